"""Ids in the order they were given up, held back while a step in flight may read what they name."""

from collections import deque

import numpy as np
import numpy.typing as npt

from engine.cache.epochs import Epochs
from engine.errors import IntegrityError

Ids = npt.NDArray[np.int32]


class GuardedQueue:
    """A ring of at most `capacity` ids.

    Positions count from the beginning and never wrap: `head <= clear <= tail`. What lies before
    `clear` was put there in a step that is finished, as was every step before it.
    """

    def __init__(self, capacity: int, epochs: Epochs) -> None:
        self.capacity = capacity
        self.head = 0
        self.tail = 0
        self._ring: Ids = np.zeros(capacity, np.int32)
        self._epochs = epochs
        self._clear = 0
        self._marks: deque[tuple[int, int]] = deque()  # epoch, tail when its last id was there

    def __len__(self) -> int:
        return self.tail - self.head

    @property
    def clear(self) -> int:
        marks, finished = self._marks, self._epochs.finished
        while marks and marks[0][0] <= finished:
            self._clear = marks.popleft()[1]
        return self._clear

    def append(self, ids: Ids) -> None:
        """Raises IntegrityError when they are more than there can be."""
        if len(self) + len(ids) > self.capacity:
            raise IntegrityError(
                f"{len(ids)} ids behind {len(self)} are more than the {self.capacity} there are"
            )
        self._write(self.tail, ids)
        self.tail += len(ids)
        epoch = self._epochs.begun
        if self._marks and self._marks[-1][0] == epoch:
            self._marks.pop()
        self._marks.append((epoch, self.tail))

    def prepend(self, ids: Ids) -> None:
        """Ids that no step in flight can read."""
        self.head -= len(ids)
        self._write(self.head, ids)

    def pop(self, num_ids: int) -> Ids:
        """The first ones: at most those before `clear`. The caller owns the array."""
        ids = self.peek(self.head, self.head + num_ids)
        self.head += num_ids
        return ids

    def peek(self, start: int, end: int) -> Ids:
        """A copy of the ids at positions [start, end)."""
        first = start % self.capacity
        num_before_end = self.capacity - first
        if end - start <= num_before_end:
            return self._ring[first : first + end - start].copy()
        rest = self._ring[: end - start - num_before_end]
        return np.concatenate((self._ring[first:], rest))

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Drop the ids of [head, tail) that are not `kept`; the others close ranks at `head`."""
        num_kept_before = np.concatenate(([0], np.cumsum(kept)))

        def moved(position: int) -> int:
            return self.head + int(num_kept_before[position - self.head])

        ids = self.peek(self.head, self.tail)[kept]
        self._clear = moved(self.clear)
        self._marks = deque((epoch, moved(position)) for epoch, position in self._marks)
        self.tail = self.head + len(ids)
        self._write(self.head, ids)

    def _write(self, position: int, ids: Ids) -> None:
        first = position % self.capacity
        num_before_end = self.capacity - first
        self._ring[first : first + len(ids)] = ids[:num_before_end]
        if len(ids) > num_before_end:
            self._ring[: len(ids) - num_before_end] = ids[num_before_end:]
