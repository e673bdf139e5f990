"""A picture of pixels: rectangles and words on white, written as PNG."""

import struct
import zlib
from typing import Literal

import numpy as np
import numpy.typing as npt

from deployments.pixel_font import ADVANCE, HEIGHT, drawn

Colour = tuple[int, int, int]
Pixels = npt.NDArray[np.uint8]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
BITS, TRUE_COLOUR = 8, 2
TEXT_SCALE = 2
TEXT_HEIGHT = TEXT_SCALE * HEIGHT


class Raster:
    """`pixels` [height, width, 3]. What lies outside is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self.pixels: Pixels = np.full((height, width, 3), 255, np.uint8)

    def fill(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        self.pixels[max(y, 0) : max(y + height, 0), max(x, 0) : max(x + width, 0)] = colour

    def write(
        self,
        x: int,
        y: int,
        text: str,
        colour: Colour,
        anchor: Literal["start", "middle", "end"] = "start",
    ) -> None:
        """(x, y) is the upper left corner, or the middle or the right end of the upper edge."""
        ink = drawn(text, TEXT_SCALE)
        x -= {"start": 0, "middle": text_width(text) // 2, "end": text_width(text)}[anchor]
        x, y = max(x, 0), max(y, 0)
        room = self.pixels[y : y + ink.shape[0], x : x + ink.shape[1]]
        room[ink[: room.shape[0], : room.shape[1]]] = colour

    def png(self) -> bytes:
        """As RFC 2083 has it: true colour, no line filtered."""
        height, width, _ = self.pixels.shape
        header = struct.pack(">IIBBBBB", width, height, BITS, TRUE_COLOUR, 0, 0, 0)
        lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each behind its filter, 0: none
        lines[:, 1:] = self.pixels.reshape(height, -1)
        data = zlib.compress(lines.tobytes(), 9)
        return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def text_width(text: str) -> int:
    """Without the gap behind the last letter."""
    return TEXT_SCALE * (ADVANCE * len(text) - 1)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
