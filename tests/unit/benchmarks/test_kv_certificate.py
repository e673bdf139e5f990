"""What the benchmark counts, at sizes for a CPU: kernels run checked."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kv_certificate import hostile
from benchmarks.kv_certificate import steps as steps_module
from benchmarks.kv_certificate.captured import Captured
from benchmarks.kv_certificate.checks import Exact, Launch, Tally, tallies_of
from benchmarks.kv_certificate.hostile import INT4, K8V4, hostile_launches
from benchmarks.kv_certificate.steps import Steps
from benchmarks.kv_certificate.stored import store, tiers_of
from kernels.checked_interpreter import checked
from kernels.tiered_plan.reference import Formats


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def launch_of(formats: Formats, epsilon: float = 0.9, num_queries: int = 2) -> Launch:
    keys, values = normal(2, 2, 517, 64), normal(2, 2, 517, 64, seed=1)
    stored = store(keys, values, tiers_of(517, 64), formats)
    skips = torch.ones(num_queries, 2, stored.num_cold, dtype=torch.int32)
    skips[:, :, 1] = 0
    query = 2 * normal(num_queries, 4, 64, seed=2)
    return Launch(stored, Exact.of(stored, 1), query, skips, epsilon, 0.125, 1)


@pytest.mark.parametrize("formats", [INT4, K8V4])
def test_what_is_stored_is_what_was_given(formats: Formats) -> None:
    tokens = normal(2, 2, 517, 64)
    exact = Exact.of(store(tokens, tokens, tiers_of(517, 64), formats), 1)
    for came, bits in ((exact.keys, formats.key_bits), (exact.values, formats.value_bits)):
        error = (came - tokens[1]).abs()
        assert error.max() < 6 / (2**bits - 1)
        assert error[:, [0, 63, 384, 516]].max() < 0.03  # sink, warm, hot


@pytest.mark.parametrize("formats", [INT4, K8V4])
def test_certificates_hold_and_are_counted(formats: Formats) -> None:
    with checked():
        tally = launch_of(formats).tally()
    assert tally.violations == 0
    assert (tally.launched, tally.masses) == (2 * 4, 2 * 4 * 4)
    assert 0 < tally.checks <= tally.launched
    assert 0.5 < tally.tightest <= 1


def test_a_lie_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(K8V4)
    with checked():
        out, lse, skipped, masses, left_out = launch.certified()
    lies = {
        "shares_violated": (out, lse, skipped - 1, masses, left_out),
        "errors_violated": (out + 3, lse, skipped, masses, left_out),
        "masses_violated": (out, lse, skipped, masses - 1, left_out),
    }
    shown = {"shares_violated": {"share"}, "errors_violated": {"error"}, "masses_violated": set()}
    for name, each in lies.items():
        monkeypatch.setattr(Launch, "certified", lambda _, each=each: each)
        tally = launch.tally()
        assert getattr(tally, name) > 0, name
        assert {each["violated"] for each in tally.examples} >= shown[name]


def test_a_share_that_no_double_has_whole_is_no_violation() -> None:
    """Of e^-720 and less the sigmoid is 0 in float64, and the share is not."""
    keys, values = torch.zeros(1, 1, 517, 64).bfloat16(), normal(1, 1, 517, 64)
    keys[:, :, 64:128, 0] = -8
    stored = store(keys, values, tiers_of(517, 64), K8V4)
    skips = torch.zeros(1, 1, stored.num_cold, dtype=torch.int32)
    skips[..., 0] = 1
    query = torch.zeros(1, 4, 64).bfloat16()
    query[..., 0] = torch.tensor([720, 728, 736, 744])

    with checked():
        tally = Launch(stored, Exact.of(stored, 0), query, skips, 0.9, 0.125).tally()

    assert (tally.launched, tally.violations) == (4, 0)


def test_few_skipped_blocks_are_no_check() -> None:
    launch = launch_of(K8V4)
    skips = torch.zeros_like(launch.skips)
    skips[:, :, 0] = 1
    with checked():
        tally = replace(launch, skips=skips).tally()
    assert (tally.checks, tally.violations, tally.launched) == (0, 0, 8)


def test_hostile_keys_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel: what it would be launched with."""
    monkeypatch.setattr(hostile, "LENGTH", 700)
    launches = list(hostile_launches(4, 1, "cpu", size=64))
    assert len(launches) == len(hostile.KEYS) * 2 * len(hostile.SHARPNESSES) * 4
    assert {each.stored.num_cold for each in launches} == {5}
    assert all(each.query.shape == (4, 32, 64) for each in launches)
    monkeypatch.setattr(Launch, "tally", lambda _: Tally(checks=8, shares_violated=1))
    (tally,) = tallies_of(iter(launches), 20).values()
    assert (tally.checks, tally.violations) == (24, 3)


def test_steps_skip_what_the_one_before_found_light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "SETTLED", 1)
    keys = normal(2, 1, 1083, 64)
    keys[:, :, 70::64] *= 3
    queries = normal(2, 1, 2, 64, seed=3).repeat(1, 4, 1, 1)
    steps = Steps(Captured(queries, keys, normal(2, 1, 1083, 64, seed=1)), K8V4, 0.4)
    with checked():
        found = steps.found()
    assert found.heads == found.again == 0.0  # of queries that stay the same
    assert found.read == pytest.approx(1 - found.skips.float().mean().item())
    assert 0 < found.read < 1
