"""Steps of known shapes, timed at start: what the cost model knows before the first request. The
kernels of prompts and of decodes have run when it is done."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.config import SchedulerConfig
from engine.outputs import PendingTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.cost_model import StepShape, shape_of
from engine.sequence import Sequence, SequenceStatus

MAX_CONTEXT = 32_768  # far enough for attention to be seen beside the matrices
DECODE_SIZES = (1, 16)

Shape = tuple[int, int, int]  # sequences, tokens of each, their context before


class Launching(Protocol):
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


def profile_steps(
    runner: Launching,
    limits: SchedulerConfig,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[StepShape, float]]:
    """Before the first sequence: overwrites blocks of the pool. Each shape runs twice, and the
    second time counts."""
    measured = []
    for shape in _shapes(runner, limits, max_model_len):
        for is_warm in (False, True):
            sequences = list(_sequences(shape, runner.block_size))
            batch = ScheduledBatch(
                tuple(ScheduledSequence(each, shape[2], shape[1]) for each in sequences)
            )
            started_s = clock()
            runner.launch(batch)()
            if is_warm:
                measured.append((shape_of(batch.scheduled), clock() - started_s))
            for each in sequences:
                each.status = SequenceStatus.FINISHED
    return measured


def _shapes(runner: Launching, limits: SchedulerConfig, max_model_len: int) -> list[Shape]:
    longest = min(MAX_CONTEXT, max_model_len - 1, runner.num_blocks * runner.block_size)
    chunk = min(limits.max_num_batched_tokens, longest)
    half, small = max(1, chunk // 2), max(1, chunk // 16)
    prefills = [
        (1, chunk, 0),
        *((1, size, at) for size in (half, small) for at in (0, longest - size)),
    ]
    sizes = [size for size in DECODE_SIZES if size <= limits.max_num_sequences]
    decodes = [(size, 1, context) for size in sizes for context in (0, longest - 1)]
    return [*prefills, *decodes]


def _sequences(shape: Shape, block_size: int) -> Iterator[Sequence]:
    """All in the same blocks: what they hold does not matter."""
    num_sequences, num_tokens, context = shape
    blocks = list(range(-(-(context + num_tokens) // block_size)))
    for index in range(num_sequences):
        yield Sequence(
            f"profile {index}",
            [0] * (context + num_tokens),
            context + num_tokens,
            SamplingParams(1, temperature=0.0),
            status=SequenceStatus.RUNNING,
            block_table=blocks,
            num_computed_tokens=context,
        )
