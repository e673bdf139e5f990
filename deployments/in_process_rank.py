"""One rank in this process: its engine as the shell's RankClient."""

import asyncio

from deployments.engine_shell import RankStatus
from engine.async_engine import AsyncEngine
from engine.cache.tiers import ColdTierCounters
from engine.outputs import StepOutput, Usage
from engine.sampling_params import SamplingParams

OUTPUT_WAIT_S = 0.5


class InProcessRank:
    """Blocking calls run in threads, as Ray runs them in a rank's process."""

    def __init__(self, engine: AsyncEngine, output_wait_s: float = OUTPUT_WAIT_S) -> None:
        self.engine = engine
        self._output_wait_s = output_wait_s

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
        return await asyncio.to_thread(self.engine.next_outputs, self._output_wait_s)

    async def status(self) -> RankStatus:
        return rank_status(self.engine)


def rank_status(engine: AsyncEngine, cold_tier: ColdTierCounters | None = None) -> RankStatus:
    stats, totals = engine.stats, engine.totals
    return RankStatus(
        stalled_s=engine.last_progress_s,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_free_blocks=stats.num_free_blocks,
        num_blocks=stats.num_blocks,
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        completion_tokens_total=totals.completion_tokens,
        preemptions_total=totals.preemptions,
        skipped=engine.skipped,
        cold_tier=cold_tier or ColdTierCounters(),
    )
