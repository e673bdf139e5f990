"""The picture shows every error, every choice and the limit, inside its frame."""

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from deployments.calibration_plot import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, plot
from engine.cache.calibration import Calibration
from engine.cache.tier_config import TierConfig

SVG = "{http://www.w3.org/2000/svg}"
FOUND = Calibration(
    model="a <model> & more",
    weights_sha="ab" * 32,
    text_sha="cd" * 32,
    num_tokens=(4096, 1700),
    tiers=TierConfig(),
    max_error=0.02,
    errors={"int4": (0.04, 0.03, 0.08), "k8v4": (0.02, 0.01, 0.05), "int8": (0.002, 0.002, 0.003)},
    cold_formats=("k8v4", "k8v4", "int8"),
)


def of_layers(num_layers: int, *errors: float, **changes: object) -> Calibration:
    by_format = {
        name: (error,) * num_layers
        for name, error in zip(("int4", "k8v4", "int8"), errors, strict=True)
    }
    changed = {"errors": by_format, "cold_formats": ("k8v4",) * num_layers} | changes
    return replace(FOUND, **changed)  # type: ignore[arg-type]


def drawn(calibration: Calibration) -> ElementTree.Element:
    return ElementTree.fromstring(plot(calibration))


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_every_error_and_every_choice_is_there() -> None:
    picture = drawn(FOUND)
    titles = [each.text for each in picture.iter(f"{SVG}title")]
    assert len(titles) == 3 * 3 + 3
    assert "layer 2, k8v4: 5 %" in titles
    assert "layer 1 keeps k8v4: 1 %" in titles
    assert "layer 2 keeps int8: 0.3 %" in titles
    assert len(list(picture.iter(f"{SVG}polyline"))) == 3
    assert {"int4: 0 layers", "k8v4: 2 layers", "int8: 1 layer", "limit 2 %"} <= set(texts(picture))
    assert any(text.startswith("a <model> & more") for text in texts(picture))
    assert any("5,796 tokens in 2 windows" in text for text in texts(picture))


def test_a_tenfold_error_is_equally_far_anywhere() -> None:
    line = drawn(of_layers(1, 0.1, 0.01, 0.001)).iter(f"{SVG}circle")
    heights = [float(each.get("cy", 0)) for each in line][1:4]  # behind that of the key
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    assert heights == sorted(heights)


@pytest.mark.parametrize(
    "calibration",
    [
        FOUND,
        of_layers(1, 0.1, 0.01, 0.001),
        of_layers(80, 0.1, 0.1, 0.1),
        of_layers(30, 0.0, 0.0, 0.0),  # every layer has a small window
        of_layers(30, 3.0, 1.0, 0.0),
        of_layers(30, 0.1, 0.01, 0.001, max_error=0.001),
        of_layers(30, 1e-7, 1e-7, 1e-7, max_error=1000.0),
    ],
)
def test_nothing_is_outside_or_on_top_of_something(calibration: Calibration) -> None:
    picture = drawn(calibration)
    for circle in list(picture.iter(f"{SVG}circle"))[1:]:
        assert LEFT <= float(circle.get("cx", 0)) <= RIGHT
        assert TOP <= float(circle.get("cy", 0)) <= BOTTOM
    labels = [each for each in picture.iter(f"{SVG}text") if float(each.get("x", 0)) > RIGHT]
    heights = sorted(float(each.get("y", 0)) for each in labels)
    assert len(heights) == 4
    assert all(later - earlier >= 17.9 for earlier, later in pairwise(heights))
    assert all(0 < float(each.get("y", 0)) < HEIGHT for each in picture.iter(f"{SVG}text"))
    assert all(RIGHT + 10 + 7.5 * len(each.text or "") < WIDTH for each in labels)
    layers = [each for each in picture.iter(f"{SVG}text") if each.get("y") == f"{BOTTOM + 21:.1f}"]
    assert 1 <= len(layers) <= 16


def test_colours_are_those_of_the_formats() -> None:
    used = [each.get("stroke") for each in drawn(FOUND).iter(f"{SVG}polyline")]
    assert used == [COLOURS["int4"], COLOURS["k8v4"], COLOURS["int8"]]
