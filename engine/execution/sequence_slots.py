"""What the device keeps of the running sequences from step to step: where their KV lies, and the
last token that was sampled for each, which the next step reads there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items

import torch

from engine.execution.uploads import upload
from engine.scheduling.batch import ScheduledSequence
from engine.sequence import Sequence, SequenceStatus


class Slots(ABC):
    """A sequence has a slot from its first chunk until it is preempted or has finished. One more
    slot, `spare`, is nobody's: for rows that only pad a batch."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.spare = num_slots
        self.device = device
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._free = list(range(num_slots))
        self._slots: dict[Sequence, int] = {}

    def keep(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """token_ids [num_slots] were sampled for slots [num_slots]."""
        self.last_tokens.index_copy_(0, slots, token_ids)

    def place(self, scheduled: Items[ScheduledSequence]) -> list[int]:
        """The slots of a step's sequences, whose tables are then on the device. Steps come in the
        order of their plans."""
        self._release()
        slots = [self._slot_of(entry.sequence) for entry in scheduled]
        self._write(scheduled, slots)
        return slots

    @abstractmethod
    def _write(self, scheduled: Items[ScheduledSequence], slots: Items[int]) -> None:
        """What of their tables the device does not have yet."""

    @abstractmethod
    def _forget(self, sequence: Sequence) -> None:
        """What the device has of its tables."""

    def _slot_of(self, sequence: Sequence) -> int:
        if sequence not in self._slots:
            self._slots[sequence] = self._free.pop()
        return self._slots[sequence]

    def _release(self) -> None:
        stopped = [each for each in self._slots if each.status is not SequenceStatus.RUNNING]
        for sequence in stopped:
            self._free.append(self._slots.pop(sequence))
            self._forget(sequence)


class SequenceSlots(Slots):
    """Of sequences with block tables."""

    def __init__(self, num_slots: int, max_num_blocks: int, device: torch.device) -> None:
        super().__init__(num_slots, device)
        shape = (num_slots + 1, max_num_blocks)
        self.block_tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self._written: dict[Sequence, tuple[int, int]] = {}  # preemptions, blocks of the table

    def _write(self, scheduled: Items[ScheduledSequence], slots: Items[int]) -> None:
        places: list[int] = []
        block_ids: list[int] = []
        for entry, slot in zip(scheduled, slots, strict=True):
            self._grow(entry.sequence, slot, places, block_ids)
        if places:
            changes = upload([places, block_ids], self.device)
            self.block_tables.view(-1).index_copy_(0, changes[0], changes[1])

    def _grow(self, sequence: Sequence, slot: int, places: list[int], block_ids: list[int]) -> None:
        num_preemptions, num_written = self._written.get(sequence, (0, 0))
        if num_preemptions != sequence.num_preemptions:  # its blocks are others
            num_written = 0
        num_blocks = len(sequence.block_table)
        if num_blocks > num_written:  # otherwise a table only grows
            first = slot * self.block_tables.shape[1]
            places += range(first + num_written, first + num_blocks)
            block_ids += sequence.block_table[num_written:]
            self._written[sequence] = sequence.num_preemptions, num_blocks

    def _forget(self, sequence: Sequence) -> None:
        self._written.pop(sequence, None)
