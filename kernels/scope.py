"""Lifetimes on a GPU: a scope owns what is opened in it, and releases it in the right order.

    with DeviceScope(cuda_device(0)) as scope:
        stream, copied = scope.stream(), scope.event()
        staging = scope.pinned(pages.nbytes)
        ...
        copied.value.record(stream.value)
        scope.keep(pages, until=copied)
        scope.give_back(staging, after=copied)

At its end the scope waits for its streams and events, then releases what was opened last first,
whatever raises. It belongs to one thread.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch

from kernels.device import Device, Kind
from kernels.errors import ScopeClosed

T = TypeVar("T")


class Owned(Generic[T]):
    """Something that a scope owns; `value` is the thing itself."""

    def __init__(self, scope: "DeviceScope", kind: Kind, value: T) -> None:
        self.kind = kind
        self._scope = scope
        self._value: T | None = value

    @property
    def value(self) -> T:
        """Raises ScopeClosed once it was released or given back."""
        if self._value is None:
            raise self._scope.closed(self.kind)
        return self._value

    def forget(self) -> None:
        self._value = None


class DeviceScope:
    def __init__(self, device: Device) -> None:
        caller = sys._getframe(1)
        self.opened_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        self.device = device
        self.is_closed = False
        self._releases: dict[Owned[Any], Callable[[], None]] = {}  # oldest first
        self._pending: list[tuple[Any, Callable[[], None]]] = []  # an event, what is due after it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stream(self) -> Owned[Any]:
        """A torch.cuda.Stream."""
        return self._open("stream")

    def event(self) -> Owned[Any]:
        """A torch.cuda.Event."""
        return self._open("event")

    def graph(self) -> Owned[Any]:
        """A torch.cuda.CUDAGraph. Record an event of the scope after each replay elsewhere than on
        a stream of the scope: the graph's memory goes with it."""
        return self._open("graph")

    def module(self, image: bytes) -> Owned[Any]:
        """A cuda.core.ObjectCode of a cubin."""
        return self._open("module", image)

    def pinned(self, nbytes: int) -> Owned[torch.Tensor]:
        """Page-locked uint8 [nbytes] from the device's pool, whatever was in it."""
        self.collect()
        buffer = self.device.pool.take(nbytes)
        owned = Owned(self, "pinned", buffer[:nbytes])
        self._releases[owned] = partial(self.device.pool.put, buffer)
        return owned

    def give_back(self, pinned: Owned[torch.Tensor], after: Owned[Any]) -> None:
        """To the pool, once the event has passed."""
        self.collect()
        if pinned not in self._releases:
            raise self.closed("pinned")
        self._pending.append((after.value, self._releases.pop(pinned)))
        pinned.forget()

    def keep(self, *tensors: torch.Tensor, until: Owned[Any]) -> None:
        """Alive, until the event has passed."""
        self.collect()
        self._pending.append((until.value, partial(_let_go, tensors)))

    def collect(self) -> None:
        """Do what is due after the events that have passed."""
        if self.is_closed:
            raise self.closed()
        passed = [each for each in self._pending if self.device.has_passed(each[0])]
        for each in passed:
            self._pending.remove(each)  # first: it is not done twice, whatever it raises
            each[1]()

    def close(self) -> None:
        """Wait, then release. Closing again does nothing. Raises an ExceptionGroup of what waits
        and releases raised, after the last of them."""
        if self.is_closed:
            return
        self.is_closed = True
        waits = [each.value for each in self._releases if each.kind in ("stream", "event")]
        waits += [event for event, _ in self._pending]
        raised = [_error_of(self.device.wait, each) for each in waits]
        while self._pending:
            raised.append(_error_of(self._pending.pop()[1]))
        while self._releases:
            owned, release = self._releases.popitem()
            owned.forget()
            raised.append(_error_of(release))
        if errors := [each for each in raised if each is not None]:
            raise BaseExceptionGroup(f"closing {self}", errors)

    def closed(self, kind: Kind | None = None) -> ScopeClosed:
        what = f"{kind} of {self}" if kind else str(self)
        return ScopeClosed(
            f"{what}: expected a use before its end, came one after it; "
            "close the scope later, or open another one"
        )

    def __str__(self) -> str:
        return f"the scope on {self.device.name} opened at {self.opened_at}"

    def _open(self, kind: Kind, image: bytes = b"") -> Owned[Any]:
        self.collect()
        handle = self.device.open(kind, image)
        owned = Owned(self, kind, handle)
        self._releases[owned] = partial(self.device.release, kind, handle)
        return owned


def _let_go(_tensors: tuple[torch.Tensor, ...]) -> None:
    """They were alive for as long as this call was due."""


def _error_of(action: Callable[..., None], *arguments: Any) -> BaseException | None:
    try:
        action(*arguments)
    except BaseException as exc:  # an interrupt too must not leak what is left
        return exc
    return None
