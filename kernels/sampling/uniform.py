"""Counter-based randomness: a uniform number as a pure function of (seed, position).

The kernel has the same formula in its own words; the constants are these.
"""

from collections.abc import Iterable

import torch

GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014): increment and two multipliers
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1


def counter_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Both [num_rows] int64 -> [num_rows] float64 in [0, 1): the top 53 bits of
    mix(mix(seed + gamma) + (position + 1) * gamma).

    The inner mix keeps neighbouring seeds from sharing a stream shifted by a few positions.
    """
    gamma = _signed(GAMMA)
    bits = _shift_right(_mix(_mix(seeds + gamma) + (positions + 1) * gamma), 11)
    return bits.to(torch.float64) * 2.0**-53


def int64_of(numbers: Iterable[int], device: torch.device | None = None) -> torch.Tensor:
    """[num_numbers] int64: whole numbers of any size modulo 2^64, as seeds count."""
    return torch.tensor([_signed(number) for number in numbers], dtype=torch.int64, device=device)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in int64 that wraps."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        state = (state ^ _shift_right(state, shift)) * _signed(multiplier)
    return state ^ _shift_right(state, SHIFTS[-1])


def _shift_right(state: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical: torch's own shift of int64 drags the sign along."""
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the low 64 bits of `number`."""
    low = number & _MASK
    return low - (1 << 64) if low >> 63 else low
