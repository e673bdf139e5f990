"""How far a kernel may be from its reference, as a share of a value: the CPU and GPU tests' one
table. Copies, and the rotation of narrow dtypes, are exact and not in it."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A sum in another order, or another exp, moves a value across one rounding, and then the next.
ROUNDINGS = {
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
}
# Of a product, as a share of its sum of magnitudes, however small it is itself: an order of float32
# additions (simulated, of 1.2 million chains of 4,096 fused multiply-adds: 2^-21.4); tensor cores,
# which cut sums of products of 16-bit floats off to zero (Fasi et al.,
# https://doi.org/10.7717/peerj-cs.330; simulated, of 14,336 random ones, 16 a step: 2^-19.6); and
# the 14 bits that Hopper's keep of sums of 8-bit floats (DeepSeek-V3,
# https://arxiv.org/abs/2412.19437, 3.3.2).
FLOAT32_SUM, NARROW_SUM, FLOAT8_SUM = 2**-21, 2**-18, 2**-13
# Of attention, besides: a weight is rounded before it meets its value (of about 1), whatever the
# size of the sum; in float32 it is the exponential of a score that was summed in another order.
ATTENTION = {
    torch.float32: 4e-6,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}
