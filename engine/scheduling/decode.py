"""One token for every decoding sequence, and who pays when the pool has no block for it."""

from engine.cache.block_allocator import BlockAllocator
from engine.scheduling.batch import ScheduledSequence
from engine.sequence import Sequence, SequenceStatus


def age(sequence: Sequence) -> tuple[int, int]:
    """Sorts the sequence that is served first to the front. No two are equal."""
    return sequence.priority, sequence.arrival_index


def plan_decodes(
    running: list[Sequence], allocator: BlockAllocator
) -> tuple[list[ScheduledSequence], list[Sequence]]:
    """Schedule one token for each decoding sequence of `running`, which is sorted by age.

    Where a block is missing, the youngest sequence leaves `running` and is returned among the
    preempted. The oldest always keeps its place, prefilling or decoding: the pool holds one
    sequence of the full context and a block more.
    """
    scheduled: list[ScheduledSequence] = []
    preempted: list[Sequence] = []
    num_kept = 1 if _oldest_prefill_is_stuck(running, allocator) else 0
    while allocator.num_free_blocks < num_kept:
        preempted.append(_preempt_youngest(running, allocator))
    for sequence in running:  # shrinks while we look, but only beyond `sequence` or at it
        if not sequence.is_decoding or sequence.is_planned_out:
            continue
        if _fills_its_blocks(sequence, allocator):
            while allocator.num_free_blocks <= num_kept and sequence not in preempted:
                preempted.append(_preempt_youngest(running, allocator))
            if sequence in preempted:
                break
            sequence.block_table += allocator.allocate(1)
        scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, 1))
    return scheduled, preempted


def _oldest_prefill_is_stuck(running: list[Sequence], allocator: BlockAllocator) -> bool:
    """Decodes are planned first; without a block kept for it, an older prefill could only watch."""
    if not running or running[0].is_decoding or running[0].is_planned_out:
        return False
    return _fills_its_blocks(running[0], allocator)


def _fills_its_blocks(sequence: Sequence, allocator: BlockAllocator) -> bool:
    return len(sequence.block_table) * allocator.block_size == sequence.num_computed_tokens


def _preempt_youngest(running: list[Sequence], allocator: BlockAllocator) -> Sequence:
    """Its full blocks stay cached while nobody needs them; it will compute the rest again."""
    victim = running.pop()
    allocator.free(victim.block_table)
    victim.block_table = []
    victim.num_computed_tokens = 0
    victim.num_preemptions += 1
    victim.status = SequenceStatus.WAITING
    return victim
