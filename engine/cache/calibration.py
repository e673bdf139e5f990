"""The calibration file: which cold format each layer keeps, and what was measured to decide it.

`flashray calibrate` makes it once for a model; the formats are fixed when an engine loads it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.cache.tier_config import TierConfig
from engine.errors import EngineError

FILE_VERSION = 1
BY_BITS = ("int4", "k8v4", "int8")  # cold formats, from the fewest bits to the most
# SmolLM2 loses no more in any layer by k8v4, which its answers hardly show; by int4 it does in two
# to seven layers of 30, on one text or another, and those count (docs/calibration.md).
DEFAULT_MAX_ERROR = 0.02
ADVICE = "make a new one: flashray calibrate MODEL TEXT"

Kind = TypeVar("Kind")


def choose_formats(
    errors: Mapping[str, Sequence[float]], wanted: str, max_error: float
) -> tuple[str, ...]:
    """Of every layer: `wanted`, or the next format with more bits whose error is at most
    `max_error`; int8 where none is. `errors`: of each cold format, every layer's."""
    candidates = BY_BITS[BY_BITS.index(wanted) :]
    return tuple(
        next((each for each in candidates if errors[each][layer] <= max_error), candidates[-1])
        for layer in range(len(errors[wanted]))
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """`tiers` is the rule of ages measured by, with the cold format that was wanted for all layers;
    `cold_formats` has one entry a layer, what it got. `errors`: of each cold format, every layer's
    relative error. `num_tokens`: of each window of the text. Raises ValueError for what cannot be.
    """

    model: str
    weights_sha: str
    text_sha: str
    num_tokens: tuple[int, ...]
    tiers: TierConfig
    max_error: float
    errors: Mapping[str, tuple[float, ...]]
    cold_formats: tuple[str, ...]

    def __post_init__(self) -> None:
        for each in self.cold_formats:
            if each not in BY_BITS:
                raise ValueError(f"cold_format must be one of {', '.join(BY_BITS)}, got {each!r}")
        if not self.cold_formats:
            raise ValueError("there must be a layer")
        if not (math.isfinite(self.max_error) and self.max_error > 0):
            raise ValueError(f"max_error must be finite and above 0, got {self.max_error}")
        if set(self.errors) != set(BY_BITS):
            raise ValueError(
                f"errors must be of {', '.join(BY_BITS)}, got {', '.join(self.errors)}"
            )
        for name, of_layers in self.errors.items():
            if len(of_layers) != self.num_layers:
                raise ValueError(
                    f"{self.num_layers} layers have a cold_format, {len(of_layers)} an error "
                    f"of {name}"
                )
            for error in of_layers:
                if not (math.isfinite(error) and error >= 0):
                    raise ValueError(f"an error must be finite and at least 0, got {error}")

    @property
    def num_layers(self) -> int:
        return len(self.cold_formats)

    @property
    def groups(self) -> list[tuple[tuple[int, ...], str]]:
        """(layers, cold format), each layer in one of them, in the order of their first layers."""
        return [
            (tuple(layer for layer, each in enumerate(self.cold_formats) if each == name), name)
            for name in dict.fromkeys(self.cold_formats)
        ]

    def refuse_other_model(self, weights_sha: str, num_layers: int) -> None:
        """Raises EngineError for weights that were not the ones measured."""
        if weights_sha != self.weights_sha:
            raise EngineError(
                f"the calibration is of {self.model}, whose weights have SHA-256 "
                f"{self.weights_sha[:12]}..., those loaded have {weights_sha[:12]}...; {ADVICE}"
            )
        if num_layers != self.num_layers:
            raise EngineError(
                f"the calibration of {self.model} is of {self.num_layers} layers, the model loaded "
                f"has {num_layers}; {ADVICE}"
            )

    def write(self, path: Path) -> None:
        """Raises OSError."""
        written = {
            "version": FILE_VERSION,
            "model": self.model,
            "weights_sha256": self.weights_sha,
            "text_sha256": self.text_sha,
            "num_tokens": self.num_tokens,
            "tiers": {
                "sink_tokens": self.tiers.sink_tokens,
                "hot_tokens": self.tiers.hot_tokens,
                "warm_tokens": self.tiers.warm_tokens,
                "cell_tokens": self.tiers.cell_tokens,
                "cold_format": self.tiers.cold_format,
            },
            "max_error": self.max_error,
            "layers": [
                {
                    "layer": layer,
                    "cold_format": cold_format,
                    "errors": {name: self.errors[name][layer] for name in BY_BITS},
                }
                for layer, cold_format in enumerate(self.cold_formats)
            ],
        }
        path.write_text(json.dumps(written, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Raises EngineError for a file that is not there, is damaged or has another version."""
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise EngineError(
                f"{path}: expected a calibration file, {exc.strerror}; {ADVICE}"
            ) from exc
        except ValueError as exc:
            raise EngineError(f"{path} is not JSON ({exc}); {ADVICE}") from exc
        if not isinstance(written, dict) or "version" not in written:
            raise EngineError(f"{path} is not a calibration file; {ADVICE}")
        if written["version"] != FILE_VERSION:
            raise EngineError(
                f"{path} is a calibration of version {written['version']!r}, this Flashray reads "
                f"version {FILE_VERSION}; {ADVICE}"
            )
        try:
            return _parse(written)
        except ValueError as exc:
            raise EngineError(f"{path} is damaged: {exc}; {ADVICE}") from exc


def _parse(written: dict[str, Any]) -> Calibration:
    layers = [_typed(each, dict, "a layer") for each in _field(written, "layers", list)]
    for place, layer in enumerate(layers):
        if _field(layer, "layer", int) != place:
            raise ValueError(f"layer {place} is missing")
    errors = [_field(layer, "errors", dict) for layer in layers]
    tiers = _field(written, "tiers", dict)
    num_tokens = _field(written, "num_tokens", list)
    return Calibration(
        model=_field(written, "model", str),
        weights_sha=_field(written, "weights_sha256", str),
        text_sha=_field(written, "text_sha256", str),
        num_tokens=tuple(_typed(each, int, "num_tokens") for each in num_tokens),
        tiers=TierConfig(
            sink_tokens=_field(tiers, "sink_tokens", int),
            hot_tokens=_field(tiers, "hot_tokens", int),
            warm_tokens=_field(tiers, "warm_tokens", int),
            cell_tokens=_field(tiers, "cell_tokens", int),
            cold_format=_field(tiers, "cold_format", str),
        ),
        max_error=_number(written, "max_error"),
        errors={name: tuple(_number(each, name) for each in errors) for name in BY_BITS},
        cold_formats=tuple(_field(layer, "cold_format", str) for layer in layers),
    )


def _number(written: dict[str, Any], name: str) -> float:
    found = written.get(name)
    return float(found) if type(found) is int else _field(written, name, float)


def _field(written: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    if name not in written:
        raise ValueError(f"{name} is missing")
    return _typed(written[name], kind, name)


def _typed(found: object, kind: type[Kind], name: str) -> Kind:
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {found!r}")
    return found
