"""Any order of placing, reading, refusing, publishing and dying: the loads are exact."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.affinity import MAX_AHEAD, MAX_SKEW, Publication, ReplicaChoice, within_share

names = st.sampled_from([f"r{number}" for number in range(12)])
tokens = st.integers(1, 500)


class Choice(RuleBasedStateMachine):
    """One router alone: whatever the replicas publish, it knows its own requests better."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = ["a", "b", "c", "d"]
        self.choice = ReplicaChoice(seed=0, clock=lambda: 0.0)
        self.choice.update(dict.fromkeys(self.tags, Publication()))
        self.unread: dict[str, tuple[str, int]] = {}
        self.read: dict[str, tuple[str, int]] = {}
        self.num_calls = 0

    @rule(name=names, group=st.integers(0, 3), num_blocks=st.integers(0, 4), weight=tokens)
    def place(self, name: str, group: int, num_blocks: int, weight: int) -> None:
        before = dict(self.choice.loads())
        refused = self.unread.pop(name, None)
        if refused is not None and refused[0] in before:
            before[refused[0]] -= refused[1]
        chain = [f"{group:04d}{block:04d}".encode() for block in range(num_blocks)]
        ranked = self.choice.place(name, self.tags, chain, weight)
        assert sorted(ranked) == sorted(set(ranked))
        open_to = {tag: before[tag] for tag in self.tags if refused is None or tag != refused[0]}
        if open_to:
            assert ranked[0] in within_share(open_to, weight)
        self.unread[name] = (ranked[0], weight)

    @rule(name=names)
    def open(self, name: str) -> None:
        self.num_calls += 1
        self.choice.opened(name, f"call {self.num_calls}")
        if name in self.unread:
            self.read[f"call {self.num_calls}"] = self.unread.pop(name)

    @precondition(lambda self: self.read)
    @rule(chosen=st.data())
    def close(self, chosen: st.DataObject) -> None:
        call_id = chosen.draw(st.sampled_from(sorted(self.read)))
        self.choice.closed(call_id)
        self.choice.closed(call_id)
        del self.read[call_id]

    @rule(name=names)
    def end(self, name: str) -> None:
        self.choice.ended(name)
        self.unread.pop(name, None)

    @precondition(lambda self: len(self.tags) > 1)
    @rule(chosen=st.data())
    def die_and_come_back(self, chosen: st.DataObject) -> None:
        dead = chosen.draw(st.sampled_from(self.tags))
        self.tags = [tag for tag in self.tags if tag != dead] + [f"{dead}'"]
        self.choice.update(dict.fromkeys(self.tags, Publication()))

    @invariant()
    def loads_are_those_in_flight(self) -> None:
        expected = dict.fromkeys(self.tags, 0)
        for tag, weight in (*self.unread.values(), *self.read.values()):
            if tag in expected:
                expected[tag] += weight
        assert self.choice.loads() == expected


TestChoice = Choice.TestCase
TestChoice.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_some_replica_always_fits_and_none_that_carries_too_much() -> None:
    from hypothesis import given

    loads = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 10**6))

    @settings(deadline=None)
    @given(loads.filter(bool), st.integers(1, 10**5))
    def holds(loads: dict[str, int], weight: int) -> None:
        fitting = within_share(loads, weight)
        assert min(loads, key=lambda tag: loads[tag]) in fitting
        mean = (sum(loads.values()) + weight) / len(loads)
        for tag in fitting:
            ahead = loads[tag] - min(loads.values())
            assert loads[tag] + weight <= MAX_SKEW * mean or ahead <= MAX_AHEAD * weight

    holds()
