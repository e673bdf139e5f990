"""What engines say of the values that they did not read reaches those who watch the router."""

from dataclasses import astuple

import pytest

from deployments.local_backend import sum_of
from engine.outputs import SkipCounts
from router.backends.base import BackendStatus, SkippedTotals
from router.metrics import RouterMetrics
from tests.unit.deployments.shells import running

COUNTS = SkipCounts(40.0, 12.0, 8.0, 2.0, 24.0, 0.25, 0.03)
GAUGES = (
    "cold_blocks",
    "read_blocks",
    "heads",
    "heads_again",
    "queries",
    "certificates",
    "certificate_max",
)


async def test_counts_of_the_engine_are_gauges_of_the_router(monkeypatch: pytest.MonkeyPatch):
    async with running() as (shell, rank):
        monkeypatch.setattr(rank.engine._engine, "_skipped", lambda: COUNTS)
        status = await shell.status()
    assert astuple(status.skipped) == astuple(COUNTS)
    text = RouterMetrics().render(status).decode()
    for name, value in zip(GAUGES, astuple(COUNTS), strict=True):
        assert f"flashray:skipping_{name} {value}\n" in text


def test_of_several_engines_they_are_sums_and_a_maximum():
    one, other = (SkippedTotals(*map(float, (*range(6), each))) for each in (0.25, 0.5))
    both = sum_of([BackendStatus(True, "", skipped=each) for each in (one, other)])
    assert astuple(both.skipped) == (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 0.5)
