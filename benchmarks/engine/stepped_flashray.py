"""Ours, timed at Engine.step()."""

import gc
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.job import Job
from benchmarks.engine.stepped import Progressed
from engine.build import build_engine_around, build_model_runner
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.backends import attention_backend, prompt_attention
from engine.sampling_params import SamplingParams

NUM_THREADS = 4


class SteppedFlashray:
    name = "flashray"

    def __init__(self, job: Job) -> None:
        tiers = None if job.cold_format is None else TierConfig(cold_format=job.cold_format)
        config = EngineConfig(
            Path(job.model),
            device=job.device,
            dtype=job.dtype,
            load_format="dummy",
            max_model_len=job.max_model_len,
            num_threads=NUM_THREADS,
            cache=CacheConfig(job.kv_cache_bytes, tiers=tiers),
            scheduler=SchedulerConfig(
                job.max_num_sequences, job.max_num_batched_tokens, job.itl_budget_ms
            ),
        )
        self.runner = build_model_runner(config)
        self._engine = build_engine_around(self.runner, config)
        gc.collect()
        gc.freeze()  # as a rank does that serves
        self.vocab_size = self._engine._vocab_size
        self.facts: dict[str, object] = {
            "cached_tokens": self._engine.stats.num_blocks * config.cache.block_size,
            "block_size": config.cache.block_size,
            "attention": attention_backend(config).__name__,
        }
        if tiers is not None:
            self.facts |= {
                "attention": f"tiers, prompts by {prompt_attention(config).__name__}",
                "cold_format": tiers.cold_format,
                "kv_bytes": self.runner.kv_bytes,
                "slabs": [
                    (group.num_key_slabs, group.num_value_slabs)
                    for group in self.runner.tier_groups
                ],
            }

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request_id: str, prompt: list[int], num_new_tokens: int) -> None:
        self._engine.add(request_id, prompt, SamplingParams(num_new_tokens, temperature=0.0))

    def step(self) -> list[Progressed]:
        return [
            Progressed(output.seq_id, len(output.token_ids), output.usage.cached_tokens)
            for output in self._engine.step().outputs
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
