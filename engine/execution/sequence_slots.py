"""What the device keeps of the running sequences from step to step: their block tables, and the
last token that was sampled for each, which the next step reads there."""

from collections.abc import Iterable

import torch

from engine.execution.uploads import upload
from engine.scheduling.batch import ScheduledSequence
from engine.sequence import Sequence, SequenceStatus


class SequenceSlots:
    """A sequence has a slot from its first chunk until it is preempted or has finished. One more
    slot, `spare`, is nobody's: for rows that only pad a batch."""

    def __init__(self, num_slots: int, max_num_blocks: int, device: torch.device) -> None:
        self.spare = num_slots
        shape = (num_slots + 1, max_num_blocks)
        self.block_tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._free = list(range(num_slots))
        self._slots: dict[Sequence, int] = {}
        self._written: dict[Sequence, tuple[int, int]] = {}  # preemptions, blocks of the table

    @property
    def device(self) -> torch.device:
        return self.block_tables.device

    def keep(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """token_ids [num_slots] were sampled for slots [num_slots]."""
        self.last_tokens.index_copy_(0, slots, token_ids)

    def place(self, scheduled: Iterable[ScheduledSequence]) -> list[int]:
        """The slots of a step's sequences, whose tables are then on the device. Steps come in the
        order of their plans."""
        self._release()
        places: list[int] = []
        block_ids: list[int] = []
        slots = [self._place(entry.sequence, places, block_ids) for entry in scheduled]
        if places:
            changes = upload([places, block_ids], self.device)
            self.block_tables.view(-1).index_copy_(0, changes[0], changes[1])
        return slots

    def _release(self) -> None:
        stopped = [each for each in self._slots if each.status is not SequenceStatus.RUNNING]
        for sequence in stopped:
            self._free.append(self._slots.pop(sequence))
            del self._written[sequence]

    def _place(self, sequence: Sequence, places: list[int], block_ids: list[int]) -> int:
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._slots[sequence] = self._free.pop()
            self._written[sequence] = sequence.num_preemptions, 0
        num_preemptions, num_written = self._written[sequence]
        if num_preemptions != sequence.num_preemptions:  # its blocks are others
            num_written = 0
        num_blocks = len(sequence.block_table)
        if num_blocks > num_written:  # otherwise a table only grows
            first = slot * self.block_tables.shape[1]
            places += range(first + num_written, first + num_blocks)
            block_ids += sequence.block_table[num_written:]
            self._written[sequence] = sequence.num_preemptions, num_blocks
        return slot
