"""The tensors of a launch as its programs see them.

Each one has a window of the address space of its own, so that an address says from which argument
it was derived, whatever was done to the pointer on the way. What is touched is looked up in the
argument's view: elements between its rows, or beside its columns, are not its own.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.checking.shadow import NOBODY, Elements, Operation, Shadow
from kernels.checking.statement import statement
from kernels.contract import Tensor
from kernels.errors import CheckFailure, DoubleStore, OutOfBounds, StoredInput, Uninitialised
from kernels.extent import span_of

# An argument begins in the middle of its window: offsets may be negative.
WINDOW_BITS = 48
MIDDLE = 1 << (WINDOW_BITS - 1)
POISON_BYTE = 0xA5
Addresses = npt.NDArray[np.uint64]
Lanes = npt.NDArray[np.bool_]
PAST = {"load": "loaded", "store": "stored", "atomic": "changed atomically"}


class Region:
    """One argument. `shadow` is there if it is stored, and shared by those in place with it."""

    def __init__(self, index: int, name: str, declared: Tensor, tensor: torch.Tensor) -> None:
        self.name, self.declared, self.tensor = name, declared, tensor
        self.shape = tuple(tensor.shape)
        self.item_bytes = tensor.element_size()
        # The low bits are the real ones: what is aligned there is aligned here.
        self.base = ((index + 1) << WINDOW_BITS) + MIDDLE + tensor.data_ptr() % (1 << 16)
        self.shadow: Shadow | None = None
        self.is_in_place = False
        self.span = span_of(tensor)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.tensor.data_ptr(), self.shape, self.tensor.stride(), self.tensor.dtype

    def elements(self, offsets: Elements) -> Elements:
        """Of offsets in elements from the first one: places in the view, or -1."""
        if self.tensor.is_contiguous():
            return np.where((offsets >= 0) & (offsets < self.span), offsets, -1)
        own, order = self._sorted
        found = np.searchsorted(own, offsets).clip(max=own.size - 1)
        return np.where(own[found] == offsets, order[found], -1)

    @cached_property
    def _sorted(self) -> tuple[Elements, Elements]:
        """The offsets of its elements in ascending order, and the place of each in the view."""
        grids = np.ix_(*(np.arange(n, dtype=np.int64) for n in self.shape))
        steps = zip(grids, self.tensor.stride(), strict=True)
        own = np.broadcast_to(sum(grid * step for grid, step in steps), self.shape).ravel()
        order = np.argsort(own, kind="stable")
        return own[order], order

    def index(self, element: int) -> list[int]:
        return [int(i) for i in np.unravel_index(element, self.shape)]

    def at(self, element: int) -> str:
        return f"index {self.index(element)} of shape {list(self.shape)}"

    def beyond(self, offset: int) -> str:
        """Where an offset is that is not an element's."""
        if not self.span:
            return f"offset {offset} of shape {list(self.shape)}, which has no elements"
        place, strides = f"offset {offset}", list(self.tensor.stride())
        if offset < 0:
            where = f"{-offset} before its first element"
        elif offset >= self.span:
            where = f"{offset - self.span + 1} past its last element"
        else:
            where = "between its rows"
        if offset >= 0 and all(strides):
            place += f", index {self._index_outside(offset)}"
        return f"{place} of shape {list(self.shape)} with strides {strides}, {where}"

    def _index_outside(self, offset: int) -> list[int]:
        index = [0] * len(self.shape)
        strides = self.tensor.stride()
        for axis in sorted(range(len(strides)), key=lambda axis: strides[axis], reverse=True):
            index[axis], offset = divmod(offset, strides[axis])
        return index

    def poison(self) -> None:
        """What is not stored shall be seen: NaN, or bytes that nobody stores."""
        if self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))
        elif self.tensor.dtype is torch.bool:
            self.tensor.fill_(True)
        else:
            item = torch.full((self.item_bytes,), POISON_BYTE, dtype=torch.uint8)
            self.tensor.copy_(item.view(self.tensor.dtype).expand(self.shape))


class Memory:
    """Of one launch. grid: three numbers. `program` is the one that runs now."""

    def __init__(
        self,
        kernel: str,
        tensors: Sequence[tuple[str, Tensor, torch.Tensor]],
        grid: tuple[int, ...],
    ) -> None:
        self.kernel, self.grid, self.program = kernel, grid, 0
        self.regions = [Region(index, *each) for index, each in enumerate(tensors)]
        for stored in self.regions:
            if stored.declared.is_stored and stored.shadow is None:
                same = [each for each in self.regions if each.key == stored.key]
                shadow = Shadow(stored.tensor.numel())
                for each in same:
                    each.shadow = shadow
                    each.is_in_place = len(same) > 1
            if stored.declared.is_whole and not stored.is_in_place:
                stored.poison()

    def access(
        self,
        operation: Operation,
        addresses: Addresses,
        mask: Lanes,
        num_bytes: int,
        values: npt.NDArray[Any] | None = None,
    ) -> Addresses:
        """Check and note the lanes of one statement, of `num_bytes` each; returns the real
        addresses of those that are not masked."""
        real = np.zeros_like(addresses)
        windows = addresses >> np.uint64(WINDOW_BITS)
        for window in np.unique(windows[mask]):
            lanes = mask & (windows == window)
            index = int(window) - 1
            if not 0 <= index < len(self.regions):
                what = f"{operation} at an address that is derived from no argument"
                raise self.failure(OutOfBounds, what, int(lanes.sum()), lanes.size)
            region = self.regions[index]
            offsets = (addresses[lanes] - np.uint64(region.base)).view(np.int64)
            stored = None if values is None else np.broadcast_to(values, lanes.shape)[lanes]
            access = Access(self, region, operation, lanes.size)
            access.visit(offsets, num_bytes, stored)
            real[lanes] = np.uint64(region.tensor.data_ptr()) + offsets.view(np.uint64)
        return real

    def finish(self) -> None:
        """After the last program: every element of an output must have been stored."""
        for region in self.regions:
            if region.declared.is_whole and region.shadow is not None:
                stored = region.shadow.is_set(np.arange(region.tensor.numel()))
                if not stored.all():
                    raise Uninitialised(
                        f"{self.kernel}: {np.count_nonzero(~stored)} of {stored.size} elements of "
                        f"{region.name} were never stored\n"
                        f"  the first at {region.at(int(np.argmin(stored)))}; "
                        f"the grid was {self.grid}"
                    )

    def coordinates(self, program: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(program, self.grid))

    def failure(
        self, kind: type[CheckFailure], what: str, num_bad: int, num_lanes: int, where: str = ""
    ) -> CheckFailure:
        """At the statement that runs now."""
        lanes = f"{num_bad} of {num_lanes} lanes, program {self.coordinates(self.program)}"
        lines = [f"{self.kernel}: {what}", where, lanes, statement()]
        return kind("\n  ".join(line for line in lines if line))


class Access:
    """The lanes of one statement that touch one argument."""

    def __init__(self, memory: Memory, region: Region, operation: Operation, lanes: int) -> None:
        self.memory, self.region, self.operation = memory, region, operation
        self.num_lanes = lanes  # of the statement, the masked ones too

    def visit(self, offsets: Elements, num_bytes: int, values: npt.NDArray[Any] | None) -> None:
        """offsets: in bytes from the first element, of each lane. values: what is stored there."""
        region, program = self.region, self.memory.program
        if self.operation != "load" and not region.declared.is_stored:
            what = f"{self.operation} into {region.name}, which its contract says is only read"
            raise self._failure(StoredInput, what, offsets.size)
        elements = self._elements(offsets, num_bytes)
        if region.shadow is None:
            return
        if self.operation != "store" and region.declared.is_whole and not region.is_in_place:
            unset = ~region.shadow.is_set(elements)
            self._refuse(Uninitialised, "before it was stored", unset, elements)
        race = region.shadow.races(self.operation, elements, program)
        if race is not None:
            earlier, others = race
            other = self.memory.coordinates(int(others[others != NOBODY][0]))
            what = f"where program {other} {PAST[earlier]}"
            self._refuse(DoubleStore, what, others != NOBODY, elements)
        if values is not None and num_bytes == region.item_bytes:
            differs = differ_where_they_meet(elements, values)
            self._refuse(DoubleStore, "by lanes that meet and differ", differs, elements)
        region.shadow.add(self.operation, elements, program)

    def _elements(self, offsets: Elements, num_bytes: int) -> Elements:
        """Those that the lanes touch; an access of a wider type touches several."""
        region = self.region
        unaligned = (offsets + region.base) % num_bytes != 0
        if unaligned.any():
            what = f"at an address that {num_bytes} does not divide"
            where = f"{offsets[unaligned][0]} bytes from its first element"
            raise self._failure(OutOfBounds, self._of(what), int(unaligned.sum()), where)
        parts = np.arange(max(1, num_bytes // region.item_bytes))
        places = (offsets // region.item_bytes)[:, None] + parts
        elements = region.elements(places)
        outside = (elements < 0).any(axis=1)
        if outside.any():
            where = region.beyond(int(places[elements < 0][0]))
            raise self._failure(OutOfBounds, self._of("out of bounds"), int(outside.sum()), where)
        return elements.ravel()

    def _refuse(self, kind: type[CheckFailure], what: str, bad: Lanes, elements: Elements) -> None:
        if bad.any():
            where = self.region.at(int(elements[bad][0]))
            raise self._failure(kind, self._of(what), int(bad.sum()), where)

    def _of(self, what: str) -> str:
        return f"{self.operation} of {self.region.name} {what}"

    def _failure(
        self, kind: type[CheckFailure], what: str, num_bad: int, where: str = ""
    ) -> CheckFailure:
        return self.memory.failure(kind, what, num_bad, self.num_lanes, where)


def differ_where_they_meet(elements: Elements, values: npt.NDArray[Any]) -> Lanes:
    """Lanes of one statement store in no order: those at one element must store the same."""
    distinct, first, group = np.unique(elements, return_index=True, return_inverse=True)
    if distinct.size == elements.size:
        return np.zeros(elements.size, bool)
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    differs: Lanes = bits[first][group] != bits
    return differs
