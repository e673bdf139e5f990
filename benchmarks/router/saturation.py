"""Saturation: the highest rate of a ladder that is still served well."""

from collections.abc import Sequence

from benchmarks.command import Progress
from benchmarks.load import LoadResult
from benchmarks.results import Row
from benchmarks.router.added_latency import offer, served
from benchmarks.router.gateways import Gateway, Gateways
from benchmarks.router.litellm_peer import PEER
from benchmarks.router.script import Dialect

OUR_LADDER = (170, 400, 700)
PEER_LADDER = (40, 80, 130)
WINDOW_S = 6.0
TIMEOUT_S = 2.0
MAX_RECOVERIES = 6  # windows
RECOVERY_PER_S, RECOVERY_WINDOW_S = 10.0, 3.0
MIN_SERVED_SHARE = 0.95
MAX_P99_MS = 1000.0
FLOORS_PER_S: dict[Dialect, float] = {"chat": 170, "messages": 130}


def keeps_up(result: LoadResult) -> bool:
    """Also False for a gateway that serves nothing."""
    return result.served_share >= MIN_SERVED_SHARE and result.latency_ms(99) <= MAX_P99_MS


async def saturation(gateways: Gateways, progress: Progress) -> list[Row]:
    """The peer last: an overload leaves it with work."""
    own = {
        dialect: await _climb(gateways.ours, dialect, OUR_LADDER, progress)
        for dialect in FLOORS_PER_S
    }
    peer = {
        dialect: await _climb(gateways.peer, dialect, PEER_LADDER, progress)
        for dialect in FLOORS_PER_S
    }
    return [
        Row(
            case=f"saturation_{dialect}",
            metric="highest offered rate with 95 % served and p99 within 1 s",
            unit="req/s",
            better="higher",
            ours=own[dialect],
            peer=PEER,
            peer_value=peer[dialect],
            floor=floor,
        )
        for dialect, floor in FLOORS_PER_S.items()
    ]


async def _recover(gateway: Gateway, dialect: Dialect, progress: Progress) -> None:
    """Wait until it is through with what an overload before left it."""
    for _ in range(MAX_RECOVERIES):
        result = await offer(
            gateway, dialect, 300, RECOVERY_PER_S, RECOVERY_WINDOW_S, timeout_s=TIMEOUT_S
        )
        if keeps_up(result):
            return
        progress(f"saturation {dialect} {gateway.name} still recovers: {served(result)}")


async def _climb(
    gateway: Gateway, dialect: Dialect, ladder: Sequence[int], progress: Progress
) -> float:
    """The last rung that was held; what was served on the first one if not even that was."""
    await _recover(gateway, dialect, progress)
    held: float | None = None
    for rate_per_s in ladder:
        result = await offer(gateway, dialect, 300, rate_per_s, WINDOW_S, timeout_s=TIMEOUT_S)
        progress(
            f"saturation {dialect} {gateway.name} at {rate_per_s}/s: "
            f"{result.served_per_s:.0f}/s, {served(result)}"
        )
        if not keeps_up(result):
            return result.served_per_s if held is None else held
        held = float(rate_per_s)
    assert held is not None
    return held
