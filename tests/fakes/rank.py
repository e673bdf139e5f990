"""A rank in this process: the real engine and its step thread over the fake executor."""

import asyncio

from deployments.engine_shell import RankStatus
from engine.async_engine import AsyncEngine
from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.outputs import StepOutput, Usage
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.fakes.executor import FakeExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 97


class InProcessRank:
    """A RankClient. Blocking calls run in threads, as Ray runs them in the rank's process."""

    def __init__(
        self, executor: FakeExecutor | None = None, num_blocks: int = 64, max_model_len: int = 512
    ) -> None:
        self.executor = executor or FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)
        scheduler = Scheduler(SchedulerConfig(16, 64), self.allocator, max_model_len, b"test")
        engine = Engine(scheduler, self.executor, vocab_size=VOCAB_SIZE, check_integrity=True)
        self.engine = AsyncEngine(engine)

    async def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None:
        self.engine.add(seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority)

    async def abort(self, seq_id: str) -> Usage | None:
        return await asyncio.to_thread(self.engine.abort, seq_id)

    async def next_outputs(self) -> list[StepOutput]:
        return await asyncio.to_thread(self.engine.next_outputs, 0.05)

    async def status(self) -> RankStatus:
        stats, totals = self.engine.stats, self.engine.totals
        return RankStatus(
            stalled_s=self.engine.last_progress_s,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            completion_tokens_total=totals.completion_tokens,
            preemptions_total=totals.preemptions,
        )
