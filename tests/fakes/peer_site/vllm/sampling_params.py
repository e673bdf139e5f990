"""Keeps what it is told."""

from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class SamplingParams:
    def __init__(self, **options) -> None:
        assert options["output_kind"] is RequestOutputKind.DELTA
        self.options = options
