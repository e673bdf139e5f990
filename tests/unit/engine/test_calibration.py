"""The calibration file: what is written is read, what cannot be used is refused with what to do."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cache.calibration import Calibration, choose_formats
from engine.cache.formats import COLD_FORMATS, Part
from engine.cache.tier_config import TierConfig
from engine.errors import EngineError

ERRORS = {"int4": (0.1, 0.04, 0.2, 0.05), "k8v4": (0.02, 0.01, 0.06, 0.03), "int8": (0.01,) * 4}
FOUND = Calibration(
    model="smollm2-135m-instruct",
    weights_sha="ab" * 32,
    text_sha="cd" * 32,
    num_tokens=(4096, 1700),
    tiers=TierConfig(cold_format="int4", warm_tokens=256),
    max_error=0.05,
    errors=ERRORS,
    cold_formats=("k8v4", "int4", "int8", "int4"),
)


@pytest.mark.parametrize(
    ("wanted", "max_error", "kept"),
    [
        ("int4", 0.05, ("k8v4", "int4", "int8", "int4")),
        ("int4", 1.0, ("int4",) * 4),
        ("k8v4", 0.05, ("k8v4", "k8v4", "int8", "k8v4")),
        ("k8v4", 0.02, ("k8v4", "k8v4", "int8", "int8")),
        ("int4", 0.001, ("int8",) * 4),  # what has the most bits is what there is
        ("int8", 0.001, ("int8",) * 4),
    ],
)
def test_a_layer_gets_the_first_format_with_more_bits_that_it_bears(
    wanted: str, max_error: float, kept: tuple[str, ...]
) -> None:
    assert choose_formats(ERRORS, wanted, max_error) == kept


def test_more_bits_are_never_fewer_slabs() -> None:
    bits = [0, 0]
    for name in ("int4", "k8v4", "int8"):
        slabs = [COLD_FORMATS[name][part].num_slabs for part in Part]
        assert sum(slabs) > sum(bits)
        bits = slabs


def test_what_is_written_is_read(tmp_path: Path) -> None:
    FOUND.write(tmp_path / "found.json")
    assert Calibration.read(tmp_path / "found.json") == FOUND


def test_the_file_says_what_the_page_promises(tmp_path: Path) -> None:
    FOUND.write(tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text())
    layers = written.pop("layers")
    assert written == {
        "version": 1,
        "model": "smollm2-135m-instruct",
        "weights_sha256": "ab" * 32,
        "text_sha256": "cd" * 32,
        "num_tokens": [4096, 1700],
        "tiers": {
            "sink_tokens": 64,
            "hot_tokens": 128,
            "warm_tokens": 256,
            "cell_tokens": 512,
            "cold_format": "int4",
        },
        "max_error": 0.05,
    }
    assert layers[2] == {
        "layer": 2,
        "cold_format": "int8",
        "errors": {"int4": 0.2, "k8v4": 0.06, "int8": 0.01},
    }


def test_groups_hold_every_layer_once() -> None:
    assert FOUND.groups == [((0,), "k8v4"), ((1, 3), "int4"), ((2,), "int8")]


def _first(num_layers: int) -> dict[str, tuple[float, ...]]:
    return {name: errors[:num_layers] for name, errors in ERRORS.items()}


def test_other_weights_and_other_layers_are_refused() -> None:
    FOUND.refuse_other_model("ab" * 32, 4)
    with pytest.raises(EngineError, match=r"of smollm2-135m-instruct.*abababab.*0000.*calibrate"):
        FOUND.refuse_other_model("0" * 64, 4)
    with pytest.raises(EngineError, match=r"4 layers, the model loaded has 30; .*calibrate MODEL"):
        FOUND.refuse_other_model("ab" * 32, 30)


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda written: written.update({name: value})


def put_in_layer(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda written: written["layers"][1].update({name: value})


def put_error(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda written: written["layers"][1]["errors"].update({"k8v4": value})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (put("version", 2), "is a calibration of version 2, this Flashray reads version 1"),
        (put("version", None), "of version None"),
        (lambda written: written.pop("version"), "is not a calibration file"),
        (lambda written: written.pop("weights_sha256"), "damaged: weights_sha256 is missing"),
        (lambda written: written.pop("tiers"), "damaged: tiers is missing"),
        (lambda written: written["tiers"].pop("hot_tokens"), "damaged: hot_tokens is missing"),
        (lambda written: written["layers"].pop(1), "damaged: layer 1 is missing"),
        (lambda written: written["layers"].clear(), "damaged: there must be a layer"),
        (lambda written: written["layers"][3]["errors"].pop("int4"), "damaged: int4 is missing"),
        (put("model", 7), "damaged: model must be of type str, got 7"),
        (put("layers", {}), "damaged: layers must be of type list"),
        (put("num_tokens", [1.5]), "damaged: num_tokens must be of type int, got 1.5"),
        (put("num_tokens", [True]), "damaged: num_tokens must be of type int, got True"),
        (put("max_error", "0.1"), "damaged: max_error must be of type float, got '0.1'"),
        (put("max_error", True), "damaged: max_error must be of type float, got True"),
        (put("max_error", 0), "damaged: max_error must be finite and above 0, got 0"),
        (put_in_layer("layer", 7), "damaged: layer 1 is missing"),
        (put_in_layer("cold_format", "fp8"), "damaged: cold_format must be one of .* got 'fp8'"),
        (put_in_layer("errors", None), "damaged: errors must be of type dict, got None"),
        (put_error(float("nan")), "damaged: an error must be finite and at least 0, got nan"),
        (put_error(-0.5), "damaged: an error must be finite and at least 0, got -0.5"),
        (lambda written: written["tiers"].update(hot_tokens=100), "damaged: hot_tokens must be a"),
        (lambda written: written["tiers"].update(cold_format="x"), "damaged: cold_format must be"),
    ],
)
def test_damage_is_named(
    damage: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    FOUND.write(path)
    written = json.loads(path.read_text())
    damage(written)
    path.write_text(json.dumps(written))
    with pytest.raises(EngineError, match=said) as caught:
        Calibration.read(path)
    assert str(path) in str(caught.value)
    assert "flashray calibrate MODEL TEXT" in str(caught.value)


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    FOUND.write(path)
    path.write_text(path.read_text().replace('"max_error": 0.05', '"max_error": 1'))
    assert Calibration.read(path) == replace(FOUND, max_error=1.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"version": 1, "mod', "is not JSON"),
        (b"", "is not JSON"),
        (b'"\xff"', "is not JSON"),
        (b"[1]", "is not a calibration file"),
        (None, "expected a calibration file, No such file or directory"),
    ],
)
def test_what_is_no_calibration_is_refused(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=said):
        Calibration.read(path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cold_formats": ("int4",) * 3}, "3 layers have a cold_format, 4 an error of int4"),
        ({"errors": {"int4": (0.1,) * 4}}, "errors must be of int4, k8v4, int8, got int4"),
        ({"max_error": float("inf")}, "max_error must be finite"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(FOUND, **wrong)
