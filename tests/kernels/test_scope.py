"""Nothing leaks, whatever raises; the last opened goes first; nothing is used after the end."""

import random
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kernels.device import MIN_PINNED_BYTES, PinnedPool
from kernels.errors import ScopeClosed
from kernels.scope import DeviceScope
from tests.fakes.gpu_device import FakeDevice, failing_at_random


def test_last_opened_is_released_first():
    device = FakeDevice()
    with DeviceScope(device) as scope:
        opened = [scope.stream(), scope.event(), scope.module(b"cubin"), scope.graph()]
        numbers = [each.value.number for each in opened]
    assert device.released == numbers[::-1]
    assert device.live == {}


def test_waits_for_streams_and_events_before_it_releases():
    device = FakeDevice()
    with DeviceScope(device) as scope:
        stream, event = scope.stream().value, scope.event().value
        stream.is_running = event.is_running = True
    assert not stream.is_running
    assert not event.is_running
    assert device.waited == [stream.number, event.number]


@pytest.mark.parametrize("kind", ["stream", "event", "graph", "pinned"])
def test_use_after_the_end(kind):
    with DeviceScope(FakeDevice()) as scope:
        opened = scope.pinned(1) if kind == "pinned" else getattr(scope, kind)()
    with pytest.raises(ScopeClosed, match=rf"{kind} of the scope on fake:0 opened at .*test_sco"):
        _ = opened.value


def test_opening_after_the_end():
    with DeviceScope(FakeDevice()) as scope:
        event = scope.event()
    for use in (scope.stream, lambda: scope.pinned(1), lambda: scope.keep(until=event)):
        with pytest.raises(ScopeClosed, match=r"^the scope on fake:0 opened at .*:\d+: expected"):
            use()


def test_closing_again_does_nothing():
    device = FakeDevice()
    scope = DeviceScope(device)
    scope.stream()
    scope.close()
    scope.close()
    assert len(device.released) == 1


def test_every_failed_release_is_told_and_none_is_left():
    device = FakeDevice(fails=lambda action, kind: action != "open" and kind != "graph")
    scope = DeviceScope(device)
    for _ in range(2):
        scope.stream(), scope.graph()
    with pytest.raises(ExceptionGroup, match="closing the scope on fake:0") as caught:
        scope.close()
    told = [str(each) for each in caught.value.exceptions]
    assert told == ["wait stream"] * 2 + ["release stream"] * 2
    assert device.live == {}


def test_a_failed_body_is_told_beside_failed_releases():
    device = FakeDevice(fails=lambda action, kind: action == "release")

    def body():
        with DeviceScope(device) as scope:
            scope.stream()
            raise ValueError("of the body")

    with pytest.raises(ExceptionGroup) as caught:
        body()
    assert isinstance(caught.value.__context__, ValueError)
    assert device.live == {}


def test_an_interrupt_while_releasing_leaks_nothing(monkeypatch):
    device = FakeDevice()
    scope = DeviceScope(device)
    scope.stream(), scope.event()
    monkeypatch.setattr(device, "wait", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(BaseExceptionGroup):
        scope.close()
    assert device.live == {}


def test_inputs_live_until_their_event():
    device = FakeDevice()
    with DeviceScope(device) as scope:
        event = scope.event()
        event.value.is_running = True
        pages = torch.zeros(3)
        is_alive = _watch(pages)
        scope.keep(pages, until=event)
        del pages
        scope.collect()
        assert is_alive()
        event.value.is_running = False
        scope.collect()
        assert not is_alive()


def test_pinned_memory_is_reused_once_its_event_has_passed():
    device = FakeDevice()
    with DeviceScope(device) as scope:
        event, first = scope.event(), scope.pinned(5000)
        assert first.value.shape == (5000,)
        address = first.value.data_ptr()
        event.value.is_running = True
        scope.give_back(first, after=event)
        with pytest.raises(ScopeClosed, match="pinned of"):
            _ = first.value
        with pytest.raises(ScopeClosed, match="pinned of"):
            scope.give_back(first, after=event)
        assert scope.pinned(5000).value.data_ptr() != address
        event.value.is_running = False
        assert scope.pinned(8192).value.data_ptr() == address  # of the same class
        assert scope.pinned(8193).value.data_ptr() != address
    assert device.pool.idle_bytes == 8192 * 2 + 16384
    with DeviceScope(device) as scope:
        scope.pinned(1), scope.pinned(0)
        assert device.pool.idle_bytes == 8192 * 2 + 16384
    device.pool.clear()
    assert device.live == {}
    assert device.pool.idle_bytes == 0


def test_the_pool_keeps_no_more_than_it_may():
    device = FakeDevice()
    pool = PinnedPool(device, max_idle_bytes=2 * MIN_PINNED_BYTES)
    buffers = [pool.take(1) for _ in range(3)]
    for buffer in buffers:
        pool.put(buffer)
    assert pool.idle_bytes == 2 * MIN_PINNED_BYTES
    assert len(device.live) == 2


def test_ten_thousand_scopes_with_failures_leak_nothing():
    device = FakeDevice(failing_at_random(seed=0, share=0.05))
    generator = random.Random(1)
    num_raised = 0
    for _ in range(10_000):
        try:
            with DeviceScope(device) as scope:
                _use(scope, generator)
        except (RuntimeError, ExceptionGroup, ZeroDivisionError):
            num_raised += 1
        assert {*device.live.values()} <= {"pinned"}  # the pool's
    assert 2_000 < num_raised < 9_000
    device.fails = lambda action, kind: False
    device.pool.clear()
    assert device.live == {}


def _use(scope: DeviceScope, generator: random.Random) -> None:
    event = scope.event()
    for _ in range(generator.randrange(6)):
        generator.choice([scope.stream, scope.event, scope.graph, lambda: scope.module(b"")])()
    pinned = scope.pinned(generator.randrange(1, 20_000))
    event.value.is_running = generator.random() < 0.5
    if generator.random() < 0.5:
        scope.give_back(pinned, after=event)
    if generator.random() < 0.1:
        raise ZeroDivisionError


class Scopes(RuleBasedStateMachine):
    """Against a list: what is live, and the order it goes in."""

    @initialize()
    def open(self):
        self.device = FakeDevice()
        self.scope = DeviceScope(self.device)
        self.opened = []
        self.kept = []
        self.last = self.scope.event()
        self.opened.append(self.last.value.number)

    @rule(kind=st.sampled_from(["stream", "event", "graph"]))
    def add(self, kind):
        self.opened.append(getattr(self.scope, kind)().value.number)

    @rule(is_running=st.booleans())
    def record(self, is_running):
        self.last.value.is_running = is_running

    @rule()
    def keep(self):
        tensor = torch.empty(1)
        self.scope.keep(tensor, until=self.last)
        self.kept.append(_watch(tensor))

    @rule(nbytes=st.integers(0, 10_000))
    def stage(self, nbytes):
        pinned = self.scope.pinned(nbytes)
        assert pinned.value.nbytes == nbytes
        self.scope.give_back(pinned, after=self.last)

    @rule()
    def close_and_open(self):
        self.scope.close()
        assert self.device.released == self.opened[::-1]
        assert {*self.device.live.values()} <= {"pinned"}
        assert not any(is_alive() for is_alive in self.kept)
        self.open()

    @invariant()
    def keeps_while_work_runs(self):
        if self.last.value.is_running:
            return
        self.scope.collect()
        assert not any(is_alive() for is_alive in self.kept)


TestScopes = Scopes.TestCase
TestScopes.settings = settings(max_examples=200, stateful_step_count=15, deadline=None)


def _watch(tensor: torch.Tensor):
    """Whether it is alive."""
    reference = weakref.ref(tensor)
    return lambda: reference() is not None
