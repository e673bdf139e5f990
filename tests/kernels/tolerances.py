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
