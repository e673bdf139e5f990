"""Who touched each element of a stored argument in a launch.

Programs of one launch run in no order, so what two of them do to one element must commute: loads
do, atomics do, nothing else does.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Operation = Literal["load", "store", "atomic"]
Elements = npt.NDArray[np.int64]  # places in an argument, counted in the order of its shape
Programs = npt.NDArray[np.int32]
NOBODY = -1
RACES_WITH: dict[Operation, tuple[Operation, ...]] = {
    "load": ("store", "atomic"),
    "store": ("store", "load", "atomic"),
    "atomic": ("store", "load"),
}


class Visits:
    """The programs that did one operation, by element: the first, and one that is not the first.

    Two are enough to answer whether a program other than a given one was there.
    """

    def __init__(self, num_elements: int) -> None:
        self.first = np.full(num_elements, NOBODY, np.int32)
        self.other = np.full(num_elements, NOBODY, np.int32)

    def add(self, elements: Elements, program: int) -> None:
        first = self.first[elements]
        self.first[elements[first == NOBODY]] = program
        self.other[elements[(first != NOBODY) & (first != program)]] = program

    def by_others(self, elements: Elements, program: int) -> Programs:
        """A program that was there and is not this one, or NOBODY."""
        first, other = self.first[elements], self.other[elements]
        return np.where((first == NOBODY) | (first == program), other, first)


class Shadow:
    def __init__(self, num_elements: int) -> None:
        self.visits: dict[Operation, Visits] = {
            "load": Visits(num_elements),
            "store": Visits(num_elements),
            "atomic": Visits(num_elements),
        }

    def add(self, operation: Operation, elements: Elements, program: int) -> None:
        self.visits[operation].add(elements, program)

    def races(
        self, operation: Operation, elements: Elements, program: int
    ) -> tuple[Operation, Programs] | None:
        """What another program did to some of the elements, and by element which one did."""
        for earlier in RACES_WITH[operation]:
            others = self.visits[earlier].by_others(elements, program)
            if (others != NOBODY).any():
                return earlier, others
        return None

    def is_set(self, elements: Elements) -> npt.NDArray[np.bool_]:
        stored, added = self.visits["store"].first, self.visits["atomic"].first
        latest: Programs = np.maximum(stored[elements], added[elements])
        return np.not_equal(latest, NOBODY)
