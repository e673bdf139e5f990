"""The gate of the GPU benchmarks: what is a tie, what is wrong, and a real engine on a CPU."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import parity
from benchmarks.engine.gpu_process import GpuProcesses
from benchmarks.engine.parity import Parity, compare, require_parity
from benchmarks.engine.parity_reference import (
    NUM_NEW_TOKENS,
    Completion,
    Reference,
    complete,
    make_reference,
    start_engine,
)
from benchmarks.errors import GateRed, MeasurementFailed
from tests.fakes.checkpoint import tiny_checkpoint

LIMITS = {"max_model_len": 256, "kv_cache_bytes": 8 << 20}
PROBED, SIDES = [-3.0, -1.0, 1.0, 3.0], (1, -1, -1, 1)
PREFERENCES = (0.5, 0.01, 3.0)  # of the first token over the second, at every step


def reference(num_prompts: int = 100) -> Reference:
    """Counts on from the prompt; the runner-up is always token 9."""
    steps = range(3)
    return Reference(
        "sha",
        [[index, index] for index in range(num_prompts)],
        [[10, 11, 12]] * num_prompts,
        [[[(10 + step, -0.1), (9, -0.1 - PREFERENCES[step])] for step in steps]] * num_prompts,
        [20, 21, 22, 23],
        [[PROBED] * 3] * num_prompts,
    )


class Counter:
    """Counts on; `says` what else, by the prompt's first token and the step. At each step log
    probabilities are off by `errors`: the likeliest by all of it, the probes by it to either side,
    and by a shift."""

    def __init__(
        self,
        says: dict[tuple[int, int], int] | None = None,
        errors: tuple[float, float, float] = (0.02, 0.02, 0.02),
    ) -> None:
        self.says = says or {}
        self.errors = errors
        self.num_asked: list[int] = []

    def __call__(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[Completion]:
        self.num_asked.append(len(prompts))
        return [
            self._one(prompt[0], range(len(prompt) - 2, len(prompt) - 2 + count))
            for prompt, count in zip(prompts, counts, strict=True)
        ]

    def _one(self, index: int, steps: range) -> Completion:
        tokens = [self.says.get((index, step), 10 + step) for step in steps]
        likeliest = [-0.1 + self.errors[step] for step in steps]
        tops = [
            [(10 + step, logprob), (9, logprob - PREFERENCES[step])]
            for step, logprob in zip(steps, likeliest, strict=True)
        ]
        probed = [
            [
                value + 7.0 + side * self.errors[step]
                for value, side in zip(PROBED, SIDES, strict=True)
            ]
            for step in steps
        ]
        return Completion(tokens, tops, probed)


def test_equal_tokens_pass() -> None:
    found = compare(reference(), Counter(), Counter())
    assert found.passed
    assert found.num_tokens == 300
    assert found.max_error == pytest.approx(0.02)
    assert found.relative_error == pytest.approx(0.02 / 5**0.5)
    assert "0 ties" in str(found)


def test_a_tie_goes_on_with_the_references_token() -> None:
    generate = Counter(says={(5, 1): 9})
    found = compare(reference(), generate, Counter())
    assert generate.num_asked == [100, 1]
    (tie,) = found.differences
    assert (tie.step, tie.expected, tie.came) == (1, 11, 9)
    assert tie.preference == pytest.approx(0.01)
    assert found.wrong == ()


def test_a_difference_beyond_the_error_is_wrong() -> None:
    found = compare(reference(), Counter(says={(5, 2): 9, (7, 0): 55}), Counter())
    assert [(each.step, each.came) for each in found.wrong] == [(2, 9), (0, 55)]
    assert found.wrong[1].preference is None
    assert not found.passed
    assert "2 wrong" in str(found)


def test_too_many_ties_do_not_pass() -> None:
    def tied(count: int) -> Parity:
        return compare(reference(), Counter({(index, 1): 9 for index in range(count)}), Counter())

    assert len(tied(6).differences) == 6
    assert tied(6).passed
    assert not tied(7).passed


def test_logits_that_are_off_or_no_numbers_do_not_pass() -> None:
    good = Parity(1, 1, 100, 0.1, 1.9e-2, ())
    assert good.passed
    assert not replace(good, relative_error=2.1e-2).passed
    with pytest.raises(MeasurementFailed, match="expected finite log probabilities"):
        compare(reference(), Counter(), Counter(errors=(0.0, math.nan, 0.0)))


def test_steps_after_a_difference_say_nothing_of_the_error() -> None:
    """Their context is another one."""
    says = {(index, 0): 9 for index in range(100)}
    wild = Counter(says, errors=(0.02, 5.0, 5.0))
    assert compare(reference(), Counter(), wild).max_error == pytest.approx(0.02)


def test_our_engine_equals_its_reference(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, max_position_embeddings=256)
    prompts = [[3], list(range(64)), list(range(200))]

    made = make_reference(model, prompts, 1, lambda message: None, **LIMITS)
    file = tmp_path / "reference.json"
    made.write(file)
    read = Reference.read(file, model)
    found = parity.check(model, read, "cpu", "float32", 1, **LIMITS)

    assert found.passed
    assert found.max_error < 2e-5
    assert [len(tokens) for tokens in read.tokens] == [NUM_NEW_TOKENS] * 3
    engine = start_engine(model, "cpu", "float32", 1, **LIMITS)
    (again,) = complete(engine, [prompts[2]], [5])
    assert again.token_ids == read.tokens[2][:5]
    assert again.tops == []


def test_a_reference_of_other_weights_is_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    reference(1).write(tmp_path / "reference.json")
    with pytest.raises(MeasurementFailed, match="--make-reference"):
        Reference.read(tmp_path / "reference.json", model)


class Scripted(GpuProcesses):
    """Every process ends as told."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status

    def run(self, module: str, arguments: Sequence[str], *others: object) -> int | None:
        assert (module, arguments) == ("benchmarks.engine.parity", ["--small"])
        return self.status


def test_the_gate_is_of_the_same_commit(tmp_path: Path) -> None:
    def gate(file: Path | None, sha: str, status: int | None = 0) -> None:
        require_parity(file, sha, Scripted(status), lambda message: None)

    file = tmp_path / "parity.json"
    file.write_text(json.dumps({"sha": "a", "passed": True}))
    gate(file, "a")
    with pytest.raises(GateRed, match="of commit b"):
        gate(file, "b")
    file.write_text(json.dumps({"sha": "a", "passed": False}))
    with pytest.raises(GateRed, match="failed"):
        gate(file, "a")
    gate(None, "a")
    with pytest.raises(GateRed, match="--small ended with 1"):
        gate(None, "a", status=1)
    with pytest.raises(GateRed, match="was ended within"):
        gate(None, "a", status=None)
