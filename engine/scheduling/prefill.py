"""Who computes prompt tokens in this step, and who may join the running sequences."""

from collections.abc import Iterable

from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.scheduling.batch import ScheduledSequence
from engine.scheduling.budget import Candidate, PrefillBudget
from engine.scheduling.decode import age
from engine.sequence import Sequence, SequenceStatus


def find_prefilling(running: Iterable[Sequence]) -> list[Candidate]:
    return [
        Candidate(sequence, sequence.num_uncomputed_tokens)
        for sequence in running
        if not (sequence.is_decoding or sequence.is_planned_out)
    ]


def find_admissible(
    waiting: list[Sequence],
    running: list[Sequence],
    allocator: BlockAllocator,
    max_num_sequences: int,
    restores: Restores,
) -> list[Candidate]:
    """The head of `waiting` that fits beside `running`: all of the prompt, what running prefills
    still need, and one block of growth for everybody. The first that does not fit holds back
    those behind it, or they would take its place for ever. Alone, a sequence always fits.

    One that fits but awaits blocks from the cold tier keeps its claim and lets others pass.
    """
    found: list[Candidate] = []
    num_awaiting = 0
    num_claimed = sum(_num_missing_blocks(sequence, allocator) for sequence in running)
    for sequence in waiting[: max_num_sequences - len(running)]:
        chain = _shareable_chain(sequence, allocator)
        hits = allocator.match_prefix(chain)
        num_needed = allocator.num_blocks_for(sequence.num_tokens) - allocator.num_referenced(hits)
        num_growth = len(running) + len(found) + num_awaiting + 1
        fits = num_claimed + num_needed + num_growth <= allocator.num_free_blocks
        if not fits and (running or found or num_awaiting):
            break
        num_claimed += num_needed
        if _is_restoring(sequence, chain, hits, allocator, restores, is_alone=not running):
            num_awaiting += 1
            continue
        num_ready = len(hits) + restores.num_found(sequence.seq_id, len(hits))
        found.append(Candidate(sequence, sequence.num_tokens - num_ready * allocator.block_size))
    return found


def plan_prefills(
    candidates: list[Candidate],
    budget: PrefillBudget,
    allocator: BlockAllocator,
    restores: Restores,
) -> list[ScheduledSequence]:
    """Share the budget out, admit the waiting candidates that get some of it, allocate the blocks
    of each chunk. A running prefill whose blocks went to decodes gets what is left of the pool.
    """
    scheduled = []
    candidates = sorted(candidates, key=lambda candidate: age(candidate.sequence))
    for candidate, num_granted in zip(candidates, budget.share(candidates), strict=True):
        sequence = candidate.sequence
        if num_granted and sequence.status is SequenceStatus.WAITING:
            _admit(sequence, allocator, restores)
        # More may be there than was wanted: blocks just placed for one are hits to the next.
        num_wanted = min(num_granted, sequence.num_uncomputed_tokens)
        num_new_tokens = min(num_wanted, _num_tokens_of_room(sequence, allocator))
        if num_new_tokens:
            start = sequence.num_computed_tokens
            _cover(sequence, start + num_new_tokens, allocator)
            scheduled.append(ScheduledSequence(sequence, start, num_new_tokens))
    return scheduled


def _shareable_chain(sequence: Sequence, allocator: BlockAllocator) -> list[bytes]:
    """Hashes of the full blocks, never of all tokens: one has to be computed to sample."""
    return sequence.block_hashes[: (sequence.num_tokens - 1) // allocator.block_size]


def _is_restoring(
    sequence: Sequence,
    chain: list[bytes],
    hits: list[int],
    allocator: BlockAllocator,
    restores: Restores,
    *,
    is_alone: bool,
) -> bool:
    """Alone, it holds nobody up: all that was found is written at its admission."""
    whose = sequence.seq_id, sequence.cache_salt, chain
    if restores.is_awaited(*whose, len(hits)):
        return True
    return not is_alone and restores.is_staged(*whose, hits, allocator)


def _admit(sequence: Sequence, allocator: BlockAllocator, restores: Restores) -> None:
    # Matched again: an older candidate's chunk may have evicted what the first look found.
    chain = _shareable_chain(sequence, allocator)
    hits = allocator.match_prefix(chain)
    allocator.acquire(hits)
    restored = restores.place(sequence.seq_id, sequence.cache_salt, chain, len(hits), allocator)
    sequence.block_table = hits + restored
    sequence.num_computed_tokens = len(sequence.block_table) * allocator.block_size
    sequence.status = SequenceStatus.RUNNING
    if sequence.num_preemptions == 0:
        sequence.num_cached_tokens = sequence.num_computed_tokens


def _cover(sequence: Sequence, num_tokens: int, allocator: BlockAllocator) -> None:
    num_missing = allocator.num_blocks_for(num_tokens) - len(sequence.block_table)
    sequence.block_table += allocator.allocate(num_missing)


def _num_missing_blocks(sequence: Sequence, allocator: BlockAllocator) -> int:
    return allocator.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)


def _num_tokens_of_room(sequence: Sequence, allocator: BlockAllocator) -> int:
    num_blocks = len(sequence.block_table) + allocator.num_free_blocks
    return num_blocks * allocator.block_size - sequence.num_computed_tokens
