"""What of the kernels' benchmark needs no GPU: its table of cases, bars and knobs."""

import importlib
from collections.abc import Mapping

import pytest

from benchmarks.kernels.attention import ATTENTION_KNOBS, attention_cases
from benchmarks.kernels.fp8 import fp8_cases
from benchmarks.kernels.image import IMAGE_KNOBS, image_cases
from benchmarks.kernels.language import language_cases
from benchmarks.kernels.linear import linear_cases
from benchmarks.kernels.measure import COMPILED, rows_of
from benchmarks.kernels.prefill_attention import PREFILL_KNOBS, prefill_cases
from benchmarks.kernels.sampling import SAMPLING_KNOBS, sampling_cases
from benchmarks.kernels.tune import KNOBS
from kernels.registry import all_kernels

ALL_CASES = [
    *language_cases(),
    *linear_cases(),
    *fp8_cases(),
    *attention_cases(),
    *prefill_cases(),
    *sampling_cases(),
    *image_cases(),
]
CASES = {case.name: case for case in ALL_CASES}
ALL_KNOBS = KNOBS | ATTENTION_KNOBS | PREFILL_KNOBS | SAMPLING_KNOBS | IMAGE_KNOBS


def test_every_case_has_a_name_of_its_own() -> None:
    assert len(CASES) == len(ALL_CASES)


def test_the_promised_cases_are_there_and_large() -> None:
    for name in (
        "rms_norm",
        "silu_mul",
        "kv_append",
        "rope_append",
        "attn_b32_8k",
        "grey",
        "resize",
        "sauvola",
    ):
        assert CASES[name].is_large
        assert CASES[name].num_bytes >= 64e6


@pytest.mark.parametrize("name", ALL_KNOBS)
def test_a_knob_turns_what_is_declared_and_turns_it_back(name: str) -> None:
    knob = ALL_KNOBS[name]
    module = importlib.import_module(knob.module)
    declared = getattr(module, knob.attribute)
    forms = [declared] if isinstance(declared, Mapping) else list(declared)

    with knob.turned_to(knob.metas[0]):
        turned = getattr(module, knob.attribute)
        assert turned in (knob.metas[0], tuple(knob.metas[0] for _ in forms))

    assert getattr(module, knob.attribute) is declared
    assert all(meta.keys() == forms[0].keys() for meta in knob.metas)
    assert name in CASES


def test_rows_carry_their_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernels.case.Case.check", lambda case, run: None)
    monkeypatch.setattr("benchmarks.kernels.case.Case.argument_sets", lambda case: [()])
    monkeypatch.setattr("benchmarks.kernels.measure._time", lambda *_: 64.0)

    def bars(name: str) -> list[tuple[str, str | None, float | None]]:
        rows = rows_of(CASES[name], copy_bytes_per_us=4.2e6, progress=lambda message: None)
        return [(row.metric, row.peer, row.floor) for row in rows if row.floor is not None]

    assert bars("grey") == [("time", COMPILED, 4.6)]
    assert bars("attn_b1_128k") == [("time", COMPILED, pytest.approx(153.3, abs=0.1))]
    assert bars("rms_norm") == [
        ("time", COMPILED, 1.0),
        ("share of the copy ceiling", None, 0.85),
    ]
    assert bars("rms_norm, 1 tokens") == []


def test_every_kernel_of_the_language_model_can_be_tuned() -> None:
    language = {name for name in all_kernels() if name in CASES}
    assert language <= ALL_KNOBS.keys()
