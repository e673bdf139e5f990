"""Who computes prompt tokens in this step, how many, and who may join the running sequences.

Short prompts pass long ones, and nobody starves: the oldest gets at least half of every budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.block_allocator import BlockAllocator
from engine.scheduling.batch import ScheduledSequence
from engine.scheduling.decode import age
from engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class TokenBudget:
    """Prompt tokens that one step may still compute. Made for the step, gone with it."""

    num_left: int

    def share(self, wanted: list[int]) -> list[int]:
        """Tokens for each sequence; `wanted` is sorted by age, oldest first.

        The oldest gets half, the rest goes to whoever is nearest to the end of its prompt.
        """
        granted = [0] * len(wanted)
        if wanted:
            granted[0] = self._take(min(wanted[0], -(-self.num_left // 2)))
        for index in sorted(range(len(wanted)), key=lambda index: wanted[index] - granted[index]):
            granted[index] += self._take(wanted[index] - granted[index])
        return granted

    def _take(self, num_wanted: int) -> int:
        num_taken = min(num_wanted, self.num_left)
        self.num_left -= num_taken
        return num_taken


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence in its prefill, or a waiting one that can be admitted."""

    sequence: Sequence
    num_wanted: int  # tokens to compute until it decodes, prefix hits taken off


def find_prefilling(running: Iterable[Sequence]) -> list[Candidate]:
    return [
        Candidate(sequence, sequence.num_uncomputed_tokens)
        for sequence in running
        if not sequence.is_decoding
    ]


def find_admissible(
    waiting: list[Sequence],
    running: list[Sequence],
    allocator: BlockAllocator,
    max_num_sequences: int,
) -> list[Candidate]:
    """The head of `waiting` that fits beside `running`: all of the prompt, what running prefills
    still need, and one block of growth for everybody. The first that does not fit holds back
    those behind it, or they would take its place for ever. Alone, a sequence always fits.
    """
    found: list[Candidate] = []
    num_claimed = sum(_num_missing_blocks(sequence, allocator) for sequence in running)
    for sequence in waiting[: max_num_sequences - len(running)]:
        hits = _match_prefix(sequence, allocator)
        num_needed = allocator.num_blocks_for(sequence.num_tokens) - allocator.num_referenced(hits)
        num_growth = len(running) + len(found) + 1
        fits = num_claimed + num_needed + num_growth <= allocator.num_free_blocks
        if not fits and (running or found):
            break
        num_claimed += num_needed
        found.append(Candidate(sequence, sequence.num_tokens - len(hits) * allocator.block_size))
    return found


def plan_prefills(
    candidates: list[Candidate], budget: TokenBudget, allocator: BlockAllocator
) -> list[ScheduledSequence]:
    """Share the budget out, admit the waiting candidates that get some of it, allocate the blocks
    of each chunk. A running prefill whose blocks went to decodes gets what is left of the pool.
    """
    scheduled = []
    candidates = sorted(candidates, key=lambda candidate: age(candidate.sequence))
    shares = budget.share([candidate.num_wanted for candidate in candidates])
    for candidate, num_granted in zip(candidates, shares, strict=True):
        sequence = candidate.sequence
        if num_granted and sequence.status is SequenceStatus.WAITING:
            _admit(sequence, allocator)
        num_new_tokens = min(num_granted, _num_tokens_of_room(sequence, allocator))
        if num_new_tokens:
            start = sequence.num_computed_tokens
            _cover(sequence, start + num_new_tokens, allocator)
            scheduled.append(ScheduledSequence(sequence, start, num_new_tokens))
    return scheduled


def _match_prefix(sequence: Sequence, allocator: BlockAllocator) -> list[int]:
    """Cached blocks of the sequence, never all of it: a token has to be computed to sample."""
    max_num_hits = (sequence.num_tokens - 1) // allocator.block_size
    return allocator.match_prefix(sequence.block_hashes[:max_num_hits])


def _admit(sequence: Sequence, allocator: BlockAllocator) -> None:
    # Matched again: an older candidate's chunk may have evicted what the first look found.
    hits = _match_prefix(sequence, allocator)
    allocator.acquire(hits)
    sequence.block_table = hits
    sequence.num_computed_tokens = len(hits) * allocator.block_size
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
