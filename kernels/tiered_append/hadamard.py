"""The rotation that spreads a head's few large channels over all, so that they take fewer bits.

It is a symmetric orthogonal matrix: its own inverse, and the score of a rotated query and a rotated
key is what it was.
"""

import torch


def is_rotatable(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., size], size a power of two -> x times Sylvester's Hadamard matrix / sqrt(size).

    By sums and differences: of the halves, then of neighbours, of those two apart, and so on. It is
    the order in which the kernel adds.
    """
    size = x.shape[-1]
    assert is_rotatable(size), x.shape
    distances = [2**step for step in range(size.bit_length() - 1)]
    for distance in distances[-1:] + distances[:-1]:
        first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
    scale: float = size**-0.5
    return x * scale
