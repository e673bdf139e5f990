"""Every block of a trace is a cell whose colour says its mass, and tiers end where a line is."""

import numpy as np
import pytest

from deployments.attention_plot import (
    BORDER,
    LEFT,
    NONE,
    RIGHT,
    STRIP_HEIGHT,
    TIER_COLOURS,
    TOP,
    colour_of,
    plot_layers,
    plot_steps,
)
from engine.execution.attention_trace import (
    EXACT,
    TIERS,
    AttentionTrace,
    Masses,
    TierRun,
    TracedStep,
)


def trace_of(
    masses: list[Masses], bounds: list[tuple[int, ...]], tiers: tuple[str, ...] = TIERS
) -> AttentionTrace:
    """masses [num_layers, num_blocks] of each step, whose tiers end at `bounds`, in tokens."""

    def step(nth: int) -> TracedStep:
        by_head = np.repeat(masses[nth][:, None], 2, axis=1)
        starts = (0, *bounds[nth][:-1])
        runs = tuple(
            TierRun(tier, start, end, 0)
            for tier, start, end in zip(tiers, starts, bounds[nth], strict=True)
        )
        ends = by_head[..., 0]
        return TracedStep(bounds[nth][-1] - 1, nth > 0, (runs,), ((),), by_head, ends, ends)

    steps = tuple(map(step, range(len(masses))))
    layers = tuple(range(len(masses[0])))
    return AttentionTrace(bounds[0][-1], (0,) * len(steps), (layers,), steps)


def random_masses(num_steps: int, num_layers: int, num_blocks: int) -> list[Masses]:
    drawn = np.random.default_rng(0).dirichlet([0.3] * num_blocks, (num_steps, num_layers))
    return list(drawn.astype(np.float32))


def test_cells_have_the_colour_of_their_mass() -> None:
    masses = random_masses(3, 4, 6)
    pixels = plot_layers(trace_of(masses, [(64, 128, 256, 380)] * 3), "a model").pixels
    mean = np.mean(masses[1:], 0)
    for layer in range(4):
        for block in range(6):
            middle = pixels[TOP + 18 * layer + 9, LEFT + 32 * block + 16]
            assert tuple(middle) == colour_of(float(mean[layer, block]))


def test_borders_lie_between_tiers_and_follow_the_steps() -> None:
    bounds = [(64, 128, 256, 381), (64, 192, 320, 382), (64, 192, 320, 385)]
    masses = [*random_masses(2, 2, 6), *random_masses(1, 2, 7)]
    pixels = plot_steps(trace_of(masses, bounds), 1, "a model").pixels
    is_line = (pixels == TIER_COLOURS["hot"]).all(2)
    for step, ends in enumerate(bounds):
        row = is_line[TOP + 18 * step + 9, LEFT:]
        borders = [LEFT + 32 * (end // 64) for end in ends[:3]]
        assert np.flatnonzero(row).tolist() == [
            x - LEFT for border in borders for x in range(border - BORDER // 2, border + 1)
        ]
    changed = is_line[TOP + 18, LEFT:]  # block 2 became cold, block 4 warm
    assert changed[2 * 32 + 4 : 3 * 32 - 4].all()
    assert changed[4 * 32 + 4 : 5 * 32 - 4].all()
    assert not changed[3 * 32 + 4 : 4 * 32 - 4].any()
    assert tuple(pixels[TOP + 9, LEFT + 6 * 32 + 16]) == NONE  # not there yet
    strip = pixels[TOP - STRIP_HEIGHT + 2, LEFT + 16 : LEFT + 7 * 32 : 32]
    expected = ["sink", "cold", "cold", "warm", "warm", "hot", "hot"]
    assert [tuple(each) for each in strip] == [TIER_COLOURS[tier] for tier in expected]


def test_an_exact_cache_has_no_tiers_to_mark() -> None:
    trace = trace_of(random_masses(2, 3, 5), [(300,), (301,)], (EXACT,))
    for raster in (plot_layers(trace, "a model"), plot_steps(trace, 0, "a model")):
        for colour in TIER_COLOURS.values():
            assert not (raster.pixels == colour).all(2).any()


@pytest.mark.parametrize(
    ("num_steps", "num_layers", "num_blocks"), [(2, 1, 1), (40, 80, 7), (2, 80, 1100)]
)
def test_no_size_is_too_small_or_too_large(
    num_steps: int, num_layers: int, num_blocks: int
) -> None:
    masses = random_masses(num_steps, num_layers, num_blocks)
    trace = trace_of(masses, [(num_blocks * 64,)] * num_steps, (EXACT,))
    for raster in (plot_layers(trace, "m"), plot_steps(trace, num_layers - 1, "m")):
        height, width, _ = raster.pixels.shape
        assert width <= LEFT + max(1024, num_blocks) + RIGHT
        assert height <= 540 + TOP + 116
        edge = raster.pixels[:, -4:]
        assert (edge == 255).all()


def test_colours_darken_by_decades() -> None:
    shades = [sum(colour_of(10.0**decade)) for decade in (-4, -3, -2, -1, 0)]
    assert shades == sorted(shades, reverse=True)
    assert colour_of(0.0) == colour_of(1e-4) == (247, 252, 240)
    assert colour_of(1.0) == (8, 29, 88)
