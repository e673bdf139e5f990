"""Batches planned by hand: a runner without a scheduler."""

from itertools import count
from pathlib import Path

from engine.build import build_model_runner
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
_names = count()


def tiny_runner(folder: Path, block_size: int = 8, max_num_sequences: int = 4) -> ModelRunner:
    return build_model_runner(
        EngineConfig(
            folder,
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_sequences=max_num_sequences),
        )
    )


def new_sequence(
    token_ids: list[int], block_table: list[int], params: SamplingParams = GREEDY
) -> Sequence:
    return Sequence(
        f"seq-{next(_names)}", list(token_ids), len(token_ids), params, block_table=block_table
    )


def plan(*chunks: tuple[Sequence, int]) -> ScheduledBatch:
    """(sequence, number of tokens to compute next) for each sequence of the step."""
    return ScheduledBatch(
        tuple(
            ScheduledSequence(sequence, sequence.num_computed_tokens, num_new_tokens)
            for sequence, num_new_tokens in chunks
        )
    )


def book(batch: ScheduledBatch) -> None:
    for entry in batch.scheduled:
        entry.sequence.num_computed_tokens = entry.end
