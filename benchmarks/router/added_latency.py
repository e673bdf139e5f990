"""Added latency: through the gateway, less what its upstream alone takes.

LiteLLM's upstream is the mock over HTTP, so the mock's own median, asked directly by the same
sender, is taken off. Ours is in the router's process, and only the scripted latency is taken off:
the HTTP exchange with the sender, which the peer has taken off, stays in our number.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.command import Progress
from benchmarks.load import LoadResult, open_loop, poisson_arrivals_s
from benchmarks.results import Row
from benchmarks.router.gateways import Gateway, Gateways
from benchmarks.router.litellm_peer import PEER
from benchmarks.router.script import UPSTREAM_LATENCY_MS, Dialect

TIMEOUT_S = 10.0
WARM_UP_PER_S, WARM_UP_S = 20.0, 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """`floors_ms` are the bars of p50 and p99."""

    name: str
    dialect: Dialect
    num_bytes: int
    rate_per_s: float
    window_s: float
    repeats: int = 1
    floors_ms: tuple[float | None, float | None] = (None, None)


CASES = (
    Case("60rps", "chat", 300, 60, 8, repeats=3, floors_ms=(8, 25)),
    Case("messages_20rps", "messages", 300, 20, 8),
    Case("76kb_5rps", "chat", 76_000, 5, 8),
)


async def offer(
    gateway: Gateway,
    dialect: Dialect,
    num_bytes: int,
    rate_per_s: float,
    window_s: float,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> LoadResult:
    """One window of Poisson arrivals, on new connections."""
    exchange = gateway.exchange(dialect, num_bytes)
    try:
        arrivals_s = poisson_arrivals_s(rate_per_s, window_s, seed)
        return await open_loop(arrivals_s, window_s, exchange.send, timeout_s)
    finally:
        await exchange.close()


async def added_latency(gateways: Gateways, progress: Progress) -> list[Row]:
    """Repeats are interleaved, ours and the peer's in turn; of several, the median."""
    for gateway in (gateways.ours, gateways.peer):
        for dialect in ("chat", "messages"):
            await offer(gateway, dialect, 300, WARM_UP_PER_S, WARM_UP_S)
    return [row for case in CASES for row in await _case(gateways, case, progress)]


async def _case(gateways: Gateways, case: Case, progress: Progress) -> list[Row]:
    own: list[LoadResult] = []
    peer: list[LoadResult] = []
    direct: list[LoadResult] = []
    for seed in range(case.repeats):
        for gateway, results in (
            (gateways.mock, direct),
            (gateways.ours, own),
            (gateways.peer, peer),
        ):
            window_s = case.window_s / 2 if gateway is gateways.mock else case.window_s
            result = await offer(
                gateway, case.dialect, case.num_bytes, case.rate_per_s, window_s, seed
            )
            results.append(result)
            progress(
                f"{case.name} {gateway.name}: p50 {result.latency_ms(50):.1f} ms, "
                f"p99 {result.latency_ms(99):.1f} ms, {served(result)}"
            )
    return _rows(case, own, peer, _median_ms(direct, 50))


def _rows(
    case: Case, own: Sequence[LoadResult], peer: Sequence[LoadResult], direct_ms: float
) -> list[Row]:
    rows = [
        Row(
            case=f"added_p{percent}_{case.name}",
            metric="added latency",
            unit="ms",
            better="lower",
            ours=_median_ms(own, percent) - UPSTREAM_LATENCY_MS,
            peer=PEER,
            peer_value=_median_ms(peer, percent) - direct_ms,
            floor=floor_ms,
        )
        for percent, floor_ms in zip((50, 99), case.floors_ms, strict=True)
    ]
    return [*rows, Row(f"mock_p50_{case.name}", "mock asked directly", "ms", "lower", direct_ms)]


def served(result: LoadResult) -> str:
    """The share that was served and why the first of the others was not."""
    failure = f", first failure: {result.failures[0]}" if result.failures else ""
    return f"served {result.served_share:.1%}{failure}"


def _median_ms(results: Sequence[LoadResult], percent: float) -> float:
    return statistics.median(result.latency_ms(percent) for result in results)
