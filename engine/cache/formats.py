"""What the keys or the values of a block can be stored as, and how many slabs that takes."""

from enum import IntEnum
from typing import NamedTuple

BLOCK_SIZE = 64  # tokens of one sequence in one block (design: blocks and slabs)


class Part(IntEnum):
    """Of a token's KV. Each has arenas, addresses and table columns of its own."""

    KEYS = 0
    VALUES = 1


class Format(IntEnum):
    """Part of block addresses: never renumbered."""

    BF16 = 0
    INT8 = 1
    INT4 = 2

    @property
    def num_slabs(self) -> int:
        """Of one block of 64 tokens: 4, 2 or 1."""
        return 4 >> self


MAX_SLABS = Format.BF16.num_slabs


class BlockFormat(NamedTuple):
    keys: Format
    values: Format


HOT = BlockFormat(Format.BF16, Format.BF16)
WARM = BlockFormat(Format.INT8, Format.INT8)
COLD_FORMATS = {
    "k8v4": BlockFormat(Format.INT8, Format.INT4),
    "int4": BlockFormat(Format.INT4, Format.INT4),
    "int8": BlockFormat(Format.INT8, Format.INT8),
}
