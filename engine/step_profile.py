"""Steps of known shapes, timed at start: what the cost model knows before the first request. The
kernels of prompts and of decodes have run when it is done."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import Protocol

from engine.cache.block_address import SequenceAddresses
from engine.cache.tiered_table import Span, TieredTable
from engine.config import SchedulerConfig
from engine.outputs import PendingTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.cost_model import StepShape, shape_of
from engine.scheduling.tenure import ArenaGroup, Tenure
from engine.sequence import Sequence, SequenceStatus

MAX_CONTEXT = 32_768  # far enough for attention to be seen beside the matrices
DECODE_SIZES = (1, 16)

Shape = tuple[int, int, int]  # sequences, tokens of each, their context before
Plan = Callable[[Shape], ScheduledBatch]  # all sequences in the same blocks, whatever these hold


class Launching(Protocol):
    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


def profile_steps(
    runner: Launching,
    limits: SchedulerConfig,
    max_context: int,
    plan: Plan,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[StepShape, float]]:
    """Before the first sequence: overwrites blocks of the pool, which holds one of `max_context`
    tokens. Each shape runs twice, and the second time counts."""
    measured = []
    for shape in _shapes(limits, max_context):
        for is_warm in (False, True):
            batch = plan(shape)
            started_s = clock()
            runner.launch(batch)()
            if is_warm:
                measured.append((shape_of(batch.scheduled), clock() - started_s))
            for entry in batch.scheduled:
                entry.sequence.status = SequenceStatus.FINISHED
    return measured


def paged_steps(block_size: int) -> Plan:
    def plan(shape: Shape) -> ScheduledBatch:
        _, num_tokens, context = shape
        blocks = list(range(-(-(context + num_tokens) // block_size)))
        entries = []
        for sequence in _sequences(shape):
            sequence.block_table = blocks
            entries.append(ScheduledSequence(sequence, context, num_tokens))
        return ScheduledBatch(tuple(entries))

    return plan


def tiered_steps(groups: Items[ArenaGroup]) -> Plan:
    """Over arenas that nobody has anything in. A decode is not the first of its sequence, which
    demotes more than any other."""

    def plan(shape: Shape) -> ScheduledBatch:
        _, num_tokens, context = shape
        end = context + num_tokens
        prefill_end = max(0, context - 1) if num_tokens == 1 else end
        tenure = Tenure(tuple(map(_open_table, groups)), prefill_end)
        while tenure.num_tokens < context:
            _extend(groups, tenure, context)
        spans, extended = [], []
        while tenure.num_tokens < end:
            extended.append(_extend(groups, tenure, end))
            spans.append(tenure.span_of(extended[-1]))
        entries = (
            ScheduledSequence(sequence, context, num_tokens, tuple(spans))
            for sequence in _sequences(shape)
        )
        demotions = (
            tuple(chain.from_iterable(span.demotions for span in of_group))
            for of_group in zip(*extended, strict=True)
        )
        for table in tenure.tables:
            table.close()
        return ScheduledBatch(tuple(entries), demotions=tuple(demotions))

    return plan


def _open_table(group: ArenaGroup) -> TieredTable:
    addresses = SequenceAddresses(group.version, (), b"", group.config.block_size)
    return TieredTable(group.arenas, group.config, addresses)


def _extend(groups: Items[ArenaGroup], tenure: Tenure, end: int) -> list[Span]:
    epochs = groups[0].arenas.epochs
    epoch = epochs.begin()
    if tenure.is_prefilling:
        end = min(end, tenure.prefill_end)
        spans = [table.extend_prefill(end - table.num_tokens) for table in tenure.tables]
    else:
        spans = [table.extend_decode() for table in tenure.tables]
    epochs.finish(epoch)
    return spans


def _shapes(limits: SchedulerConfig, max_context: int) -> list[Shape]:
    longest = min(MAX_CONTEXT, max_context)
    chunk = min(limits.max_num_batched_tokens, longest)
    half, small = max(1, chunk // 2), max(1, chunk // 16)
    prefills = [
        (1, chunk, 0),
        *((1, size, at) for size in (half, small) for at in (0, longest - size)),
    ]
    sizes = [size for size in DECODE_SIZES if size <= limits.max_num_sequences]
    decodes = [(size, 1, context) for size in sizes for context in (0, longest - 1)]
    return [*prefills, *decodes]


def _sequences(shape: Shape) -> Iterator[Sequence]:
    num_sequences, num_tokens, context = shape
    for index in range(num_sequences):
        yield Sequence(
            f"profile {index}",
            [0] * (context + num_tokens),
            context + num_tokens,
            SamplingParams(1, temperature=0.0),
            status=SequenceStatus.RUNNING,
            num_computed_tokens=context,
        )
