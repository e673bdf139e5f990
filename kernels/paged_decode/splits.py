"""Into how many runs of tiles a context is cut, so that enough programs read it at once.

The host knows the greatest context only, so each sequence's own cut is made on the GPU, by a rule
that these numbers set: at most `most` splits, none of less than `min_tiles` tiles.
"""

from dataclasses import dataclass

from kernels.launch import cdiv

MIN_TOKENS = 64
# Few enough for little scratch, many enough for one long sequence to keep a GPU busy.
FIXED_MOST, FIXED_MIN_TOKENS = 64, 256


@dataclass(frozen=True, slots=True)
class Splits:
    """count: of the grid, enough for the greatest context."""

    count: int
    most: int
    min_tiles: int


def fitting_splits(max_tokens: int, tile: int, num_rows: int, max_programs: int) -> Splits:
    """One wave, for one and a little takes the time of two: `max_programs` run at once, and each
    split of a context is one of every of `num_rows` (sequences x KV heads)."""
    min_tiles = max(1, MIN_TOKENS // tile)
    wave = max(1, max_programs // max(1, num_rows))
    count = max(1, min(wave, cdiv(cdiv(max_tokens, tile), min_tiles)))
    return Splits(count, count, min_tiles)


def fixed_splits(max_tokens: int, tile: int) -> Splits:
    """How a context is cut depends on its own length alone, and so do a row's bits."""
    min_tiles = max(1, FIXED_MIN_TOKENS // tile)
    count = max(1, min(FIXED_MOST, cdiv(cdiv(max_tokens, tile), min_tiles)))
    return Splits(count, FIXED_MOST, min_tiles)
