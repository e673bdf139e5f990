"""Where the time goes: the same request to the router alone, behind Serve's proxy, and with
the script behind a handle, where the engine is. Differences of medians at an easy rate."""

from benchmarks.command import Progress
from benchmarks.results import Row
from benchmarks.router.added_latency import offer
from benchmarks.router.gateways import Gateway, serve_app
from benchmarks.router.script import UPSTREAM_LATENCY_MS

RATE_PER_S, WINDOW_S = 20.0, 6.0
WARM_UP_S = 3.0


async def added_p50_ms(gateway: Gateway, progress: Progress) -> float:
    """Over the scripted latency, at the split's rate."""
    await offer(gateway, "chat", 300, RATE_PER_S, WARM_UP_S, seed=1)
    result = await offer(gateway, "chat", 300, RATE_PER_S, WINDOW_S)
    progress(f"split {gateway.name}: p50 {result.latency_ms(50):.1f} ms")
    return result.latency_ms(50) - UPSTREAM_LATENCY_MS


async def split(router_ms: float, progress: Progress) -> list[Row]:
    """`router_ms` is what the router alone adds under uvicorn."""
    with serve_app("scripted") as gateway:
        proxied_ms = await added_p50_ms(gateway, progress)
    with serve_app("deployment") as gateway:
        whole_ms = await added_p50_ms(gateway, progress)
    parts = {
        "split_router": router_ms,
        "split_serve_proxy": proxied_ms - router_ms,
        "split_engine_call": whole_ms - proxied_ms,
        "split_whole": whole_ms,
    }
    return [
        Row(case, "added latency, p50 at 20 req/s", "ms", "lower", ours)
        for case, ours in parts.items()
    ]
