"""The pictures of a trace: how much of the attention falls on each block, by layer or by step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.raster import TEXT_HEIGHT, Colour, Raster, text_width
from engine.cache.formats import BLOCK_SIZE
from engine.execution.attention_trace import EXACT, AttentionTrace, Masses

LEFT, RIGHT, TOP, GAP = 64, 72, 92, 8
STRIP_HEIGHT, BAR_WIDTH, BORDER = 10, 360, 2
MAX_CELL_WIDTH, MAX_ROW_HEIGHT = 32, 18
MAX_MAP_WIDTH, MAX_MAP_HEIGHT = 1024, 540  # unless a block, or a row, were less than a pixel
MIN_TICK_WIDTH = 84

INK, FAINT, NONE = (31, 41, 51), (97, 110, 124), (228, 231, 235)
TIER_COLOURS: dict[str, Colour] = {  # distinct to the colour-blind
    "sink": (204, 121, 167),
    "cold": (0, 114, 178),
    "warm": (230, 159, 0),
    "hot": (213, 94, 0),
}
LEAST_DECADE = -4  # what is less looks like this
SCALE = np.array(  # a colour a decade, up to 1
    [(247, 252, 240), (190, 228, 190), (90, 180, 190), (30, 100, 170), (8, 29, 88)], np.float64
)

Tiers = npt.NDArray[np.int8]


def plot_layers(trace: AttentionTrace, name: str) -> Raster:
    """All layers, a mean over the decodes."""
    decodes = trace.by_block[1:]
    tiers = np.stack([_tiers_of(trace, layer)[-1] for layer in range(trace.num_layers)])
    title = f"{name}: attention by layer and block of {BLOCK_SIZE} tokens"
    subtitle = f"part of the softmax, mean of {len(decodes)} decodes and all heads"
    return _Map(title, subtitle, "layer", decodes.mean(0), tiers, trace.tiers).drawn()


def plot_steps(trace: AttentionTrace, layer: int, name: str) -> Raster:
    """One layer, a row a step: the first is that of the prompt's last token."""
    title = f"{name}: attention of layer {layer} by step"
    subtitle = f"part of the softmax, mean of all heads, from token {trace.steps[0].position:,} on"
    masses = trace.by_block[:, layer]
    return _Map(title, subtitle, "step", masses, _tiers_of(trace, layer), trace.tiers).drawn()


def _tiers_of(trace: AttentionTrace, layer: int) -> Tiers:
    """[num_steps, num_blocks]: the number of a block's tier, -1 where it is not seen."""
    found = np.full((len(trace.steps), trace.steps[-1].num_blocks), -1, np.int8)
    for row, step in zip(found, trace.steps, strict=True):
        for nth, run in enumerate(trace.runs(step, layer)):
            row[run.start // BLOCK_SIZE : -(-run.end // BLOCK_SIZE)] = nth
    return found


@dataclass(frozen=True, slots=True)
class _Map:
    """`masses`, `tiers` [num_rows, num_blocks]."""

    title: str
    subtitle: str
    row_name: str
    masses: Masses
    tiers: Tiers
    tier_names: tuple[str, ...]

    def drawn(self) -> Raster:
        num_rows, num_blocks = self.masses.shape
        right = LEFT + num_blocks * self._cell_width
        bottom = TOP + num_rows * self._row_height
        texts = max(text_width(self.title), text_width(self.subtitle))
        width = max(right, LEFT + max(texts, BAR_WIDTH + MIN_TICK_WIDTH)) + RIGHT
        raster = Raster(width, bottom + 116)
        raster.write(LEFT, 14, self.title, INK)
        raster.write(LEFT, 40, self.subtitle, FAINT)
        self._draw_cells(raster)
        self._draw_borders(raster)
        self._draw_strip(raster)
        self._draw_axes(raster, bottom)
        self._draw_scale(raster, bottom + 72)
        return raster

    @property
    def _cell_width(self) -> int:
        return min(max(MAX_MAP_WIDTH // len(self.masses[0]), 1), MAX_CELL_WIDTH)

    @property
    def _row_height(self) -> int:
        return min(max(MAX_MAP_HEIGHT // len(self.masses), 1), MAX_ROW_HEIGHT)

    def _cells(self) -> Iterator[tuple[int, int, int, int]]:
        """row, block, x, y."""
        for row, block in np.ndindex(self.masses.shape):
            yield row, block, LEFT + block * self._cell_width, TOP + row * self._row_height

    def _draw_cells(self, raster: Raster) -> None:
        for row, block, x, y in self._cells():
            is_there = self.tiers[row, block] >= 0
            colour = colour_of(float(self.masses[row, block])) if is_there else NONE
            raster.fill(x, y, self._cell_width, self._row_height, colour)

    def _draw_borders(self, raster: Raster) -> None:
        """Wherever blocks side by side, or of a step and the next, are of two tiers."""
        colour = TIER_COLOURS["hot"]
        for row, block, x, y in self._cells():
            tier = self.tiers[row, block]
            if tier < 0:
                continue
            if block and self.tiers[row, block - 1] != tier:
                raster.fill(x - BORDER // 2, y, BORDER, self._row_height, colour)
            if row and self.tiers[row - 1, block] not in (tier, -1):
                raster.fill(x, y - BORDER // 2, self._cell_width, BORDER, colour)

    def _draw_strip(self, raster: Raster) -> None:
        """The tiers of the last row, and what their colours mean."""
        if self.tier_names == (EXACT,):
            return
        for block, tier in enumerate(self.tiers[-1]):
            colour = TIER_COLOURS[self.tier_names[tier]]
            x, y = LEFT + block * self._cell_width, TOP - STRIP_HEIGHT - 2
            raster.fill(x, y, self._cell_width, STRIP_HEIGHT, colour)
        x = LEFT
        for name in self.tier_names:
            raster.fill(x, 64, STRIP_HEIGHT, STRIP_HEIGHT, TIER_COLOURS[name])
            raster.write(x + STRIP_HEIGHT + 6, 62, name, FAINT)
            x += STRIP_HEIGHT + 30 + text_width(name)

    def _draw_axes(self, raster: Raster, bottom: int) -> None:
        num_rows, num_blocks = self.masses.shape
        every = -(-(TEXT_HEIGHT + 4) // self._row_height)
        for row in range(0, num_rows, every):
            y = TOP + row * self._row_height + (self._row_height - TEXT_HEIGHT) // 2
            raster.write(LEFT - GAP, y, str(row), FAINT, "end")
        every = 1
        while every * self._cell_width < MIN_TICK_WIDTH:
            every *= 2
        for block in range(0, num_blocks, every):
            x = LEFT + block * self._cell_width
            raster.fill(x, bottom, 1, 5, FAINT)
            raster.write(x, bottom + 9, f"{block * BLOCK_SIZE:,}", FAINT)
        raster.write(LEFT, bottom + 34, f"across: tokens, down: {self.row_name}s", FAINT)

    def _draw_scale(self, raster: Raster, y: int) -> None:
        for x in range(BAR_WIDTH):
            mass = 10.0 ** (LEAST_DECADE * (1 - x / (BAR_WIDTH - 1)))
            raster.fill(LEFT + x, y, 1, STRIP_HEIGHT, colour_of(mass))
        for x, text in ((0, "0.01 %"), (BAR_WIDTH // 2, "1 %"), (BAR_WIDTH, "100 %")):
            raster.write(LEFT + x, y + STRIP_HEIGHT + 6, text, FAINT, "middle" if x else "start")


def colour_of(mass: float) -> Colour:
    """By the logarithm of `mass`, in [0, 1]."""
    decade = np.log10(max(mass, 10.0**LEAST_DECADE)) - LEAST_DECADE
    lower = min(int(decade), len(SCALE) - 2)
    red, green, blue = SCALE[lower] + (SCALE[lower + 1] - SCALE[lower]) * (decade - lower)
    return round(red), round(green), round(blue)
