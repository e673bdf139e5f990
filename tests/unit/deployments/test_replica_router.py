"""Serve's side of replica choice, without Serve: what is read of requests and replicas."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest

from deployments.replica_router import (
    MAX_HASHED_TOKENS,
    ReplicaRouter,
    prefix_chain,
    publications_of,
    routing_stats,
)
from engine.cache.block_allocator import BlockAllocator
from engine.cache.formats import BLOCK_SIZE
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.sequence import Sequence
from router.affinity import PREFIX_BYTES, Publication
from router.generation import GenerationRequest, SamplingSettings


@dataclass
class FakeReplica:
    tag: str
    routing_stats: dict[str, Any] = field(default_factory=dict)

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.tag)


REPLICAS = [FakeReplica("a"), FakeReplica("b"), FakeReplica("c")]


@pytest.fixture
def router() -> ReplicaRouter:
    """Without Serve's own part, which none of these calls reaches."""
    router = ReplicaRouter.__new__(ReplicaRouter)
    router.initialize_state()
    router._choice.update(publications_of(REPLICAS))
    return router


def request(prompt: tuple[int, ...], salt: str = "red", name: str = "r") -> GenerationRequest:
    sampling = SamplingSettings(max_tokens=4)
    return GenerationRequest(name, "tiny", prompt, sampling, cache_salt=salt)


def pending(method: str, *arguments: Any, **addressed: Any) -> PendingRequest:
    metadata = SimpleNamespace(call_method=method, internal_request_id=f"{method}-call")
    return PendingRequest(args=list(arguments), kwargs=addressed, metadata=metadata)


async def ranking(router: ReplicaRouter, call: PendingRequest) -> list[list[str]]:
    ranks = await router.choose_replicas(REPLICAS, call)
    return [[replica.tag for replica in rank] for rank in ranks]


def test_the_chain_is_the_schedulers_own():
    prompt = tuple(n % 251 for n in range(3 * BLOCK_SIZE + 5))
    params = SamplingParams(max_tokens=4)
    sequence = Sequence("s", list(prompt), len(prompt), params, cache_salt=b"red")
    PagedSpace(BlockAllocator(16, BLOCK_SIZE, True), b"").prepare(sequence)
    assert prefix_chain(request(prompt)) == [
        block_hash[:PREFIX_BYTES] for block_hash in sequence.block_hashes
    ]
    assert len(sequence.block_hashes) == 3


def test_tenants_share_no_prefix_and_a_very_long_prompt_is_hashed_in_part():
    prompt = tuple(range(BLOCK_SIZE))
    assert prefix_chain(request(prompt, "red")) != prefix_chain(request(prompt, "blue"))
    longest = (7,) * (MAX_HASHED_TOKENS + 5 * BLOCK_SIZE)
    assert len(prefix_chain(request(longest))) == MAX_HASHED_TOKENS // BLOCK_SIZE


def test_publications_survive_the_way_through_serve():
    published = Publication(b"8 bytes.", 77)
    replicas = [FakeReplica("a", routing_stats(published)), FakeReplica("b")]
    assert publications_of(replicas) == {"a": published, "b": Publication()}


async def test_a_replica_that_refused_is_not_asked_again_while_there_is_another(router):
    prompt = tuple(range(200))
    publication = Publication(b"".join(prefix_chain(request(prompt))), 0)
    router._choice.update({"a": publication, "b": Publication(), "c": Publication()})
    submit = pending("submit", request(prompt), avoid=("a", "c"))
    assert await ranking(router, submit) == [["b"]]
    nowhere = pending("submit", request(prompt, name="s"), avoid=("a", "b", "c"))
    assert (await ranking(router, nowhere))[0] == ["a"]


async def test_submit_follows_the_prefix(router):
    prompt = tuple(range(200))
    publication = Publication(b"".join(prefix_chain(request(prompt))), 0)
    router._choice.update({"a": Publication(), "b": publication, "c": Publication()})
    assert (await ranking(router, pending("submit", request(prompt))))[0] == ["b"]
    others = await ranking(router, pending("submit", request(prompt, "blue", "s")))
    assert sorted(others) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("method", ["subscribe", "abort", "acknowledge"])
async def test_what_is_addressed_goes_there_and_nowhere_else(router, method):
    assert await ranking(router, pending(method, "r", replica="c")) == [["c"]]


async def test_what_is_addressed_to_nobody_or_to_the_dead_goes_to_any(router):
    assert await ranking(router, pending("subscribe", "r", replica="gone")) == [["a", "b", "c"]]
    assert await ranking(router, pending("rank_pids")) == [["a", "b", "c"]]
    assert await router.choose_replicas(REPLICAS, None) == [REPLICAS]


async def test_a_generation_is_a_load_until_its_reader_is_done(router):
    asked = request((1,) * 96)
    await ranking(router, pending("submit", asked))
    subscribe = pending("subscribe", "r", 0)
    router.on_request_routed(subscribe, REPLICAS[0].replica_id, None)
    router.on_request_completed(REPLICAS[0].replica_id, "submit-call")
    assert sum(router._choice.loads().values()) == 100
    router.on_request_completed(REPLICAS[0].replica_id, "subscribe-call")
    assert sum(router._choice.loads().values()) == 0


async def test_a_generation_that_is_aborted_unread_is_no_load(router):
    await ranking(router, pending("submit", request((1,) * 96)))
    router.on_request_routed(pending("abort", "r"), REPLICAS[0].replica_id, None)
    assert sum(router._choice.loads().values()) == 0


async def test_a_generation_that_is_followed_is_a_load_until_it_is_accounted_for(router):
    asked = request((1,) * 96)
    for avoid in ((), ("a",)):  # refused by the first one
        submit = pending("submit", asked, avoid=avoid, reader="one")
        await ranking(router, submit)
        router.on_request_routed(submit, REPLICAS[0].replica_id, None)
    assert sum(router._choice.loads().values()) == 100
    router.on_request_routed(pending("acknowledge", ["r"]), REPLICAS[0].replica_id, None)
    assert sum(router._choice.loads().values()) == 0
