"""Who gets a request, and what a router believes of its replicas."""

import heapq
import random

import pytest

from router.affinity import (
    MAX_SKEW,
    MAX_UNREAD_S,
    Publication,
    RecentPrefixes,
    ReplicaChoice,
    load_tokens,
    within_share,
)
from router.generation import GenerationRequest, SamplingSettings

TAGS = ("a", "b", "c", "d")


def chain_of(group: int, num_blocks: int) -> list[bytes]:
    return [f"{group:04d}{block:04d}".encode() for block in range(num_blocks)]


@pytest.fixture
def choice() -> ReplicaChoice:
    choice = ReplicaChoice(seed=0)
    choice.update({tag: Publication() for tag in TAGS})
    return choice


def publication(*chains: list[bytes], tokens: int = 0) -> Publication:
    return Publication(b"".join(b"".join(chain) for chain in chains), tokens)


def test_the_longest_published_prefix_wins(choice):
    choice.update(
        {
            "a": Publication(),
            "b": publication(chain_of(1, 2)),
            "c": publication(chain_of(1, 5)),
            "d": publication(chain_of(2, 9)),
        }
    )
    assert choice.place("r", TAGS, chain_of(1, 8), 100)[0] == "c"
    assert choice.place("s", TAGS, chain_of(2, 8), 100)[0] == "d"


def test_a_gap_in_a_chain_ends_the_match(choice):
    chain = chain_of(1, 6)
    choice.update({"a": publication(chain[:2]), "b": publication([chain[0], *chain[2:]])} | rest())
    assert choice.place("r", TAGS, chain, 100)[0] == "a"


def rest() -> dict[str, Publication]:
    return {"c": Publication(), "d": Publication()}


def test_what_was_sent_is_known_before_it_is_published(choice):
    first = choice.place("r0", TAGS, chain_of(1, 4), 100)[0]
    choice.opened("r0", "call")
    choice.closed("call")
    assert all(choice.place(f"r{n}", TAGS, chain_of(1, 4), 1)[0] == first for n in range(1, 3))


def test_what_was_sent_outlives_one_publication_and_not_two(choice):
    """The first may have been written before the request arrived; the second knows better."""
    chain = chain_of(1, 4)
    chosen = choice.place("r", TAGS, chain, 100)[0]
    others = {tag: Publication() for tag in TAGS if tag != chosen}
    replica = choice._replicas[chosen]
    choice.update({**others, chosen: Publication(b"other..1")})
    assert replica.num_known(chain) == 4
    choice.update({**others, chosen: Publication(b"other..1")})  # the same one again
    assert replica.num_known(chain) == 4
    choice.update({**others, chosen: Publication(b"other..2")})
    assert replica.num_known(chain) == 0


def test_affinity_yields_to_load(choice):
    chain = chain_of(1, 8)
    choice.update({tag: publication(chain if tag == "a" else []) for tag in TAGS})
    chosen = [choice.place(f"r{n}", TAGS, chain, 100)[0] for n in range(40)]
    assert chosen[:2] == ["a", "a"]
    loads = choice.loads()
    assert sum(loads.values()) == 4000
    assert max(loads.values()) <= MAX_SKEW * 1000


def test_of_equal_prefixes_the_less_loaded_replica(choice):
    chain = chain_of(1, 8)
    loads = {"a": 900, "b": 700, "c": 800, "d": 900}
    choice.update({tag: publication(chain, tokens=load) for tag, load in loads.items()})
    assert choice.place("r", TAGS, chain, 10)[0] == "b"


def test_without_a_prefix_the_load_spreads(choice):
    for n in range(400):
        choice.place(f"r{n}", TAGS, chain_of(n, 2), 100)
    assert max(choice.loads().values()) <= 1.1 * 10_000


def test_load_of_other_routers_counts_as_published(choice):
    choice.place("mine", ["a"], [], 300)
    choice.update({"a": publication(tokens=1000)} | dict.fromkeys("bcd", Publication()))
    assert choice.loads()["a"] == 1000
    choice.opened("mine", "call")
    choice.closed("call")
    assert choice.loads()["a"] == 700
    choice.update({"a": publication(tokens=0)} | dict.fromkeys("bcd", Publication()))
    assert choice.loads()["a"] == 0


def test_a_refused_request_goes_elsewhere_and_is_counted_once(choice):
    first = choice.place("r", TAGS, [], 100)[0]
    second = choice.place("r", TAGS, [], 100)[0]
    assert first != second
    assert sum(choice.loads().values()) == 100
    assert choice.place("only", ["a"], [], 1) == choice.place("only", ["a"], [], 1) == ["a"]


def test_what_nobody_reads_stops_counting():
    now_s = 0.0
    choice = ReplicaChoice(seed=0, clock=lambda: now_s)
    choice.update({tag: Publication() for tag in TAGS})
    choice.place("unread", TAGS, [], 100)
    choice.place("read", TAGS, [], 10)
    choice.opened("read", "call")
    now_s = MAX_UNREAD_S + 1
    choice.place("new", TAGS, [], 1)
    assert sum(choice.loads().values()) == 11
    choice.ended("new")
    choice.closed("call")
    choice.closed("call")
    assert sum(choice.loads().values()) == 0


def test_a_replica_that_is_gone_is_not_chosen_and_its_flights_land_nowhere(choice):
    chosen = choice.place("r", TAGS, chain_of(1, 3), 100)[0]
    others = [tag for tag in TAGS if tag != chosen]
    choice.update({tag: Publication() for tag in others})
    choice.ended("r")
    assert choice.loads() == dict.fromkeys(others, 0)
    assert chosen not in choice.place("s", TAGS, chain_of(1, 3), 100)
    choice.update({})
    assert choice.place("t", TAGS, [], 100) == []


def test_recent_prefixes_keep_the_heads_of_what_was_used_last():
    recent = RecentPrefixes(capacity=5)
    old, new = chain_of(1, 3), chain_of(2, 3)
    recent.use(old)
    recent.use(new)
    assert all(prefix in recent for prefix in (*new, *old[:2]))
    assert old[2] not in recent
    recent.use(chain_of(3, 9))
    assert recent.packed() == b"".join(reversed(chain_of(3, 9)[:5]))


def test_a_request_weighs_its_prompt_and_a_capped_answer():
    def weight(max_tokens: int) -> int:
        sampling = SamplingSettings(max_tokens=max_tokens)
        return load_tokens(GenerationRequest("r", "m", (1,) * 50, sampling))

    assert weight(7) == 57
    assert weight(1_000_000) < 50 + 100_000


def test_within_share_lets_a_request_in_flight_pass_and_no_crowd():
    assert within_share({"a": 0, "b": 0}, 100) == ["a", "b"]
    assert within_share({"a": 100, "b": 0, "c": 0, "d": 0}, 100) == ["a", "b", "c", "d"]
    assert within_share({"a": 200, "b": 0, "c": 0, "d": 0}, 100) == ["b", "c", "d"]
    assert within_share({"a": 1300, "b": 1000, "c": 1000, "d": 900}, 100) == ["b", "c", "d"]


@pytest.mark.parametrize("num_at_once", [4, 8, 16, 32])
@pytest.mark.parametrize(("num_groups", "exponent"), [(12, 1.0), (6, 0.0), (40, 1.0)])
def test_hot_prefixes_are_found_and_the_load_stays_even(num_at_once, num_groups, exponent):
    """A closed loop over replicas with endless caches: hits against one endless cache, and tokens
    served by the busiest replica against the mean."""
    share, skew = simulate(num_at_once, num_groups, exponent)
    assert share >= 0.9
    assert skew <= MAX_SKEW


def simulate(num_at_once: int, num_groups: int, exponent: float) -> tuple[float, float]:
    chosen = random.Random(1)
    weights = [1 / (group + 1) ** exponent for group in range(num_groups)]
    choice = ReplicaChoice(seed=1)
    choice.update({tag: Publication() for tag in TAGS})
    served, held = dict.fromkeys(TAGS, 0), {tag: set() for tag in TAGS}
    running: list[tuple[float, str]] = []
    now_s, num_hits, num_oracle_hits = 0.0, 0, 0
    for number in range(600):
        if len(running) == num_at_once:
            now_s, ended = heapq.heappop(running)
            choice.closed(ended)
        (group,) = chosen.choices(range(num_groups), weights)
        tokens, name = 512 + chosen.randrange(24, 80), str(number)
        tag = choice.place(name, TAGS, chain_of(group, 8), tokens)[0]
        choice.opened(name, name)
        num_hits += group in held[tag]
        num_oracle_hits += any(group in groups for groups in held.values())
        prefill_s = 0.0 if group in held[tag] else 1.0
        held[tag].add(group)
        served[tag] += tokens
        heapq.heappush(running, (now_s + prefill_s + chosen.uniform(0.2, 0.4), name))
    return num_hits / num_oracle_hits, max(served.values()) / (sum(served.values()) / len(TAGS))
