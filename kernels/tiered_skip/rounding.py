"""How far a score of the kernels can be from the exact one: at most scale * |query| * reach, where
the reach is what this module finds of stored keys; and the sums of their exponentials at most as
far, and SUM_ERROR farther.

Proof. Let a be the query over its unit, a power of two u with |a_d| < 1 and u <= 2 |query|; s and z
a channel's scale and zero as they are kept, c = code - BIAS + z in those steps (of high nibbles
16 times as many), so that the stored key is k = s c to the bit. The kernel has

1. a' = float16(a): exact from 2^-17 on, else off by 2^-25 at most, for a has 8 bits;
2. g = float16(a' s): |g - a s| <= 2^-11 |a| s + 2^-25 (1.001 s + 1);
3. sum_d g_d c_d, in products of 16 channels: first those of the biases of the codes, then of the
   zeros, then of the biased codes, each product of two float16 exact, added up in float32. A tensor
   core aligns the 16 products and what they are added to to the greatest of them, with 24 bits or
   more, cuts off the rest, and cuts the sum to 24 bits (Fasi et al., Numerical behavior of NVIDIA
   tensor cores, 2021; later ones keep more): at most 18 * 2^-23 of the greatest. That is at most
   M = sum_d |g_d| W_d, W_d = |bias| + |z_d| + greatest code, for biased codes take the bias back as
   they come. So the sum is off by at most STEP * steps * M, with 6 * (size / 2) / 16 steps and one
   for an addition of two sums.

From 2 the exact sum of g c is off from that of a k by
sum_d 2^-11 |a_d| |k_d| + 2^-25 (1.001 |k_d| + |c_d|). With K_d and C_d the greatest |k_d| and |c_d|
that codes of that scale and zero can stand for, both errors together, times u, are at most
sum_d |query_d| w_d + u t <= |query| (|w| + 2 t), with

    w_d = 2^-11 K_d + 1.001 STEP steps s_d W_d
    t   = sum_d 2^-25 (1.001 s_d + 1) (C_d + STEP steps W_d).

Keys of bfloat16 meet a query of bfloat16: there is 3 alone, of size / 16 steps, and M is at most
|query| |k|. What follows is float32: scores times scale, of three roundings (2^-21 |k| is more than
they make), less their greatest, exp2 and sums. Those: 2^-21 for each block that a run has taken
when the exponential is added and for each partial sum that is merged, and for the last logarithm.
SUM_ERROR is that of 8,000 of them; a run of more is a context of a million tokens in one.
What float32 has no exponent for is less than LOST of the greatest weight for a whole run, which the
kernel adds to what it skipped.
"""

import torch

from kernels.kv_quantise.layout import BIAS, HIGH_NIBBLE, LEVELS, unpack_key_meta

STEP = 18 * 2.0**-23
HALF_ROUNDING = 2.0**-11
SMALLEST_HALF = 2.0**-25  # half of it
SCORE_ROUNDING = 2.0**-21
SUM_ERROR = 2.0**-8
LOST = 2.0**-100
NORM_ROUNDING = 1 + 2.0**-10  # of the query's length in float32, and of this module's own
MAGIC = 1024.0  # of what the kernels add to codes


def reach_of_blocks(key_meta: torch.Tensor, bits: int) -> torch.Tensor:
    """key_meta [..., 2, size] float16, of slots of blocks of `bits` -> [...] float32."""
    scales, zeros = unpack_key_meta(key_meta.double()).unbind(-2)
    size = scales.shape[-1]
    factors = torch.ones(size, dtype=torch.float64, device=scales.device)
    if bits == 4:
        factors[size // 2 :] = HIGH_NIBBLE
    least, greatest = zeros - BIAS[bits] * factors, zeros + (LEVELS[bits] - BIAS[bits]) * factors
    farthest = torch.maximum(least.abs(), greatest.abs())
    cut = STEP * (6 * (size // 2 // 16) + 1)
    weights = MAGIC + (BIAS[bits] + LEVELS[bits]) * factors + zeros.abs()
    per_channel = (HALF_ROUNDING + SCORE_ROUNDING) * scales * farthest
    per_channel = per_channel + 1.001 * cut * scales * weights
    small = SMALLEST_HALF * (1.001 * scales + 1) * (farthest + cut * weights)
    reach: torch.Tensor = (per_channel.norm(dim=-1) + 2 * small.sum(-1)) * NORM_ROUNDING
    return reach.float()


def reach_of_tokens(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """lengths: |key| of tokens of bfloat16, or bounds of them -> as they."""
    return lengths * ((STEP * (size // 16) + SCORE_ROUNDING) * NORM_ROUNDING)
