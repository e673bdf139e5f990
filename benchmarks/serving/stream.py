"""One streamed answer of /v1/messages, timed as its reader sees it."""

import itertools
import json
import time
from dataclasses import dataclass

import httpx

from benchmarks.load import ExchangeFailed


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """`ttft_ms`: from sending to the first text. `gaps_ms`: between text events that follow one
    another; an event may carry more than one token when the engine flushed several at once."""

    ttft_ms: float
    gaps_ms: tuple[float, ...]
    num_tokens: int
    duration_ms: float

    @property
    def tpot_ms(self) -> float | None:
        """The mean time of a token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.duration_ms - self.ttft_ms) / (self.num_tokens - 1)


async def timed_stream(
    client: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str]
) -> StreamTiming:
    """Raises ExchangeFailed when it is refused, broken, or ends before its `message_stop`."""
    started_s = time.perf_counter()
    text_s: list[float] = []
    num_tokens, has_ended = 0, False
    try:
        async with client.stream("POST", "/v1/messages", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise ExchangeFailed(f"{answer.status_code} {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "content_block_delta":
                    text_s.append(time.perf_counter())
                elif event["type"] == "message_delta":
                    num_tokens = event["usage"]["output_tokens"]
                has_ended = has_ended or event["type"] == "message_stop"
    except httpx.HTTPError as exc:
        raise ExchangeFailed(repr(exc)) from exc
    if not has_ended or not text_s:
        raise ExchangeFailed(f"a stream of {len(text_s)} texts, ended: {has_ended}")
    return StreamTiming(
        ttft_ms=(text_s[0] - started_s) * 1e3,
        gaps_ms=tuple((b - a) * 1e3 for a, b in itertools.pairwise(text_s)),
        num_tokens=num_tokens,
        duration_ms=(time.perf_counter() - started_s) * 1e3,
    )
