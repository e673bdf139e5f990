"""Shells over the real engine on a fake executor, without Ray, and what tests ask of them."""

import asyncio
import contextlib
import threading

from deployments.engine_shell import EngineShell, ShellOptions
from router.generation import GenerationRequest, SamplingSettings, TokenEvent
from tests.fakes.executor import FakeExecutor
from tests.fakes.rank import BLOCK_SIZE, VOCAB_SIZE, InProcessRank

PROMPT = tuple(range(1, 21))
LEASE_S = 30.0


class Throttle:
    """Holds the executor back until steps are handed out; `open` lets it run freely."""

    def __init__(self, num_steps: int = 0) -> None:
        self._steps = threading.Semaphore(num_steps)
        self._is_open = False

    def __call__(self) -> None:
        if not self._is_open:
            assert self._steps.acquire(timeout=20)

    def open(self) -> None:
        self._is_open = True
        self._steps.release(64)


def request(request_id: str = "r", *, max_tokens: int = 40, grace_s: float = 0.0, prompt=PROMPT):
    sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id, "m", tuple(prompt), sampling, grace_s=grace_s)


@contextlib.asynccontextmanager
async def running(throttle: Throttle | None = None, options: ShellOptions | None = None, **rank):
    executor = FakeExecutor(
        BLOCK_SIZE, vocab_size=VOCAB_SIZE, before_step=throttle or (lambda: None)
    )
    in_process = InProcessRank(rank.pop("executor", executor), **rank)
    shell = EngineShell(in_process, options or ShellOptions(lease_s=LEASE_S))
    shell.start()
    try:
        yield shell, in_process
    finally:
        if throttle is not None:
            throttle.open()
        in_process.engine.shutdown(10)
        await shell.stop()


async def read_all(
    shell: EngineShell, request_id: str, after_index: int = 0, into: list[TokenEvent] | None = None
) -> list[TokenEvent]:
    seen = [] if into is None else into
    async for events in shell.subscribe(request_id, after_index):
        seen += events
    return seen


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def until(condition, timeout_s: float = 1.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)
