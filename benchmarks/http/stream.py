"""One streamed chat completion: its bytes and when they came; what they say is read afterwards, so
that reading delays no other stream."""

import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.http.traffic import Request
from benchmarks.load import ExchangeFailed

ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Arrival:
    """In seconds of the system's monotonic clock, which all processes share."""

    sent_s: float
    chunks: tuple[tuple[float, bytes], ...]
    num_tokens: int  # asked for


@dataclass(frozen=True, slots=True)
class Timing:
    """`text_s`: when each event with text came; one may carry several tokens."""

    sent_s: float
    text_s: tuple[float, ...]
    num_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.text_s[0] - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """The mean time of a token after the first; 0 for a single one."""
        return (self.text_s[-1] - self.text_s[0]) * 1e3 / max(1, self.num_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        return [(late - early) * 1e3 for early, late in itertools.pairwise(self.text_s)]

    def tokens_within(self, start_s: float, end_s: float) -> float:
        """The share of the tokens whose events came then."""
        num_events = sum(start_s <= each < end_s for each in self.text_s)
        return self.num_tokens * num_events / len(self.text_s)


def body(model: str, request: Request) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(session: aiohttp.ClientSession, model: str, request: Request) -> Arrival:
    """Raises ExchangeFailed when it is refused or broken."""
    sent_s = time.monotonic()
    try:
        async with session.post(ROUTE, json=body(model, request)) as answer:
            if answer.status != 200:
                raise ExchangeFailed(f"{answer.status} {(await answer.read())[:300]!r}")
            pieces = answer.content.iter_any()
            chunks = [(time.monotonic(), piece) async for piece in pieces]
    except aiohttp.ClientError as exc:
        raise ExchangeFailed(repr(exc)) from exc
    return Arrival(sent_s, tuple(chunks), request.num_tokens)


def timing(arrival: Arrival) -> Timing:
    """Raises ExchangeFailed for a stream that broke, or that has another number of tokens."""
    text_s: list[float] = []
    usage: dict[str, int] = {}
    has_ended, unfinished = False, b""
    for came_s, chunk in arrival.chunks:
        *events, unfinished = (unfinished + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for content in map(_data, events):
            if content == b"[DONE]":
                has_ended = True
            elif content:
                event = json.loads(content)
                usage = event.get("usage") or usage
                text_s += [came_s] * any(map(_text, event.get("choices", ())))
    num_tokens = usage.get("completion_tokens")
    if not has_ended or not text_s or num_tokens != arrival.num_tokens:
        raise ExchangeFailed(
            f"expected {arrival.num_tokens} tokens, got {num_tokens} in {len(text_s)} events, "
            f"ended: {has_ended}; the last bytes: {arrival.chunks[-1:]!r}"
        )
    return Timing(arrival.sent_s, tuple(text_s), arrival.num_tokens)


def _data(event: bytes) -> bytes:
    """Keep-alives are comments of one line before an event."""
    lines = (line.removeprefix(b"data:") for line in event.split(b"\n") if line[:5] == b"data:")
    return b"\n".join(lines).strip()


def _text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("delta", {}).get("content"))
