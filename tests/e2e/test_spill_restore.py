"""Greedy tokens with spilling forced equal those without: the real engine and the real client of
the cold store, over a KV pool ten times too small; what is lost or damaged is computed again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deployments.cold_client import ColdClient
from deployments.cold_store import ColdStoreLimits
from engine.async_engine import AsyncEngine
from engine.build import (
    build_engine,
    build_follower,
    build_leader,
    build_model_runner,
    open_ring,
)
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import EngineError, RankLost
from engine.outputs import Usage
from engine.ranks.group import TorchRanks
from engine.ranks.plan_ring import PlanReader
from engine.sampling_params import SamplingParams
from tests.fakes.cold_store import InProcessStore
from tests.unit.engine.rank_threads import run_ranks
from tests.unit.engine.tiny_checkpoint import save_tiny

BLOCK_SIZE = 8
NUM_BLOCKS = 26
TINY_BLOCK_BYTES = 3 * 2 * BLOCK_SIZE * 2 * 16 * 4
LIMITS = ColdStoreLimits(max_bytes=64 << 20, max_tenant_bytes=32 << 20, chunk_bytes=64 << 10)
Request = tuple[list[int], bytes]  # prompt, tenant
Answer = tuple[list[int], Usage]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


def config_of(
    folder: Path, num_blocks: int, block_bytes: int = TINY_BLOCK_BYTES, **changes: int
) -> EngineConfig:
    sizes = {"max_model_len": 96, "block_size": BLOCK_SIZE} | changes
    return EngineConfig(
        folder,
        max_model_len=sizes["max_model_len"],
        cache=CacheConfig(num_blocks * block_bytes, sizes["block_size"]),
        scheduler=SchedulerConfig(4, 64),
        check_integrity=True,
    )


@contextmanager
def client_of(store: InProcessStore, rank: int = 0, num_ranks: int = 1) -> Iterator[ColdClient]:
    client = ColdClient(lambda: [store], rank=rank, num_ranks=num_ranks)
    yield client
    client.close()


def drawn(num_prompts: int, length: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 199, (num_prompts, length), generator=generator).tolist()


def complete(engine: Engine, requests: Sequence[Request], max_tokens: int = 8) -> list[Answer]:
    params = SamplingParams(max_tokens, temperature=0.0)
    for index, (prompt, tenant) in enumerate(requests):
        engine.add(str(index), prompt, params, cache_salt=tenant)
    token_ids: list[list[int]] = [[] for _ in requests]
    usages: dict[int, Usage] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            token_ids[int(output.seq_id)] += output.token_ids
            usages[int(output.seq_id)] = output.usage
    return [(token_ids[index], usages[index]) for index in range(len(requests))]


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [token_ids for token_ids, _ in answers]


def cached(answers: Sequence[Answer]) -> int:
    return sum(usage.cached_tokens for _, usage in answers)


def expected_of(folder: Path, requests: Sequence[Request]) -> list[list[int]]:
    """Without spilling, over a pool that never evicts what runs."""
    return tokens(complete(build_engine(config_of(folder, 4 * 13)), requests))


def test_five_hundred_requests_over_a_pool_ten_times_too_small(folder: Path) -> None:
    """Two tenants ask about thirty texts of nine blocks, again and again in another order."""
    texts = drawn(30, 72)
    requests = [
        (texts[number * 7 % 30] + drawn(1, 1 + number % 15, number)[0], b"ab"[number % 2 :][:1])
        for number in range(500)
    ]
    assert 10 * NUM_BLOCKS <= 30 * 9
    expected = expected_of(folder, requests)
    with client_of(InProcessStore(LIMITS)) as tier:
        engine = build_engine(config_of(folder, NUM_BLOCKS), tier)
        answers = complete(engine, requests)
        counters = tier.counters

    assert tokens(answers) == expected
    assert engine.stats.num_blocks == NUM_BLOCKS
    assert engine.totals.spilled_blocks > 1000
    assert engine.totals.restored_blocks > 1000
    assert min(counters.spilled, counters.restored) > 1000
    assert counters.corrupt == 0
    assert cached(answers) > 0.5 * sum(len(prompt) for prompt, _ in requests)


def test_preempted_sequences_come_back_with_their_blocks(folder: Path) -> None:
    """Four short prompts that grow far beyond the pool: it holds two and a half of them."""
    requests = [(prompt, b"") for prompt in drawn(8, 16)]
    expected = tokens(complete(build_engine(config_of(folder, 4 * 13)), requests, 70))
    with client_of(InProcessStore(LIMITS)) as tier:
        engine = build_engine(config_of(folder, NUM_BLOCKS), tier)
        answers = complete(engine, requests, 70)
        assert tier.counters.restored > 0

    assert tokens(answers) == expected
    assert engine.totals.preemptions > 0


def test_another_engine_reads_what_the_first_has_spilled(folder: Path) -> None:
    store = InProcessStore(LIMITS)
    requests = [(prompt, b"") for prompt in drawn(12, 80)]
    with client_of(store) as tier:
        first = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)
        assert tier.flush(10)
    with client_of(store) as tier:
        second = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests[:6])
        assert tier.counters.restored > 0

    assert cached(first) == 0
    assert tokens(second) == tokens(first)[:6]
    assert cached(second) == 6 * 72  # of 80: the last token is always computed


def test_an_engine_that_ends_in_order_leaves_all_it_has_cached(folder: Path) -> None:
    store = InProcessStore(LIMITS)
    requests = [(prompt, b"") for prompt in drawn(2, 80)]
    with client_of(store) as tier:
        engine = build_engine(config_of(folder, NUM_BLOCKS), tier)
        first = complete(engine, requests)
        assert engine.totals.spilled_blocks == 0
        for _ in engine.spill_cached():
            assert tier.flush(10)
        assert tier.counters.spilled == 2 * 10
    with client_of(store) as tier:
        second = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)

    assert tokens(second) == tokens(first)
    assert cached(second) == 2 * 72


def test_only_an_engine_that_was_shut_down_hands_over_what_it_has_cached(folder: Path) -> None:
    with client_of(InProcessStore(LIMITS)) as tier:
        engine = AsyncEngine(build_engine(config_of(folder, NUM_BLOCKS), tier))
        engine.add("long", drawn(1, 40)[0], SamplingParams(50, temperature=0.0))
        engine.next_outputs(10)
        assert list(engine.spill_cached()) == []
        engine.shutdown(10)
        assert list(engine.spill_cached()) != []
        assert tier.flush(10)
        assert tier.counters.spilled >= 40 // BLOCK_SIZE


def flip(content: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    content[100] ^= 1
    return content


def cut_short(content: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    return content[:100]


def lose(_content: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    return None


@pytest.mark.parametrize("fault", [flip, cut_short, lose])
def test_damaged_truncated_and_missing_objects_are_computed_again(folder: Path, fault) -> None:
    """Every second object has the fault."""
    store = InProcessStore(LIMITS)
    requests = [(prompt, b"") for prompt in drawn(12, 80)]
    expected = expected_of(folder, requests)
    with client_of(store) as tier:
        complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)
        assert tier.flush(10)
    store.objects[::2] = [fault(content) for content in store.objects[::2]]
    with client_of(store) as tier:
        answers = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)
        counters = tier.counters

    assert tokens(answers) == expected
    assert (counters.corrupt > 0) == (fault is not lose)
    assert counters.missed > counters.corrupt
    assert counters.restored > 0


def test_tenants_share_no_block_at_any_level(folder: Path) -> None:
    store = InProcessStore(LIMITS)
    texts = drawn(12, 80)
    with client_of(store) as tier:
        engine = build_engine(config_of(folder, NUM_BLOCKS), tier)
        of_red = complete(engine, [(text, b"red") for text in texts])
        of_blue = complete(engine, [(text, b"blue") for text in texts])
        assert tier.counters.restored == 0
        assert cached(of_red) == cached(of_blue) == 0
        again = complete(engine, [(text, b"red") for text in texts])
        assert cached(again) > 0
        assert tier.flush(10)

    assert tokens(of_red) == tokens(of_blue) == tokens(again)
    hashes: dict[bytes, set[bytes]] = {b"red": set(), b"blue": set()}
    for tenant, block_hash, _ in store.actor._places:
        hashes[tenant].add(block_hash)
    assert min(map(len, hashes.values())) > 0
    assert not hashes[b"red"] & hashes[b"blue"]
    assert all(len({key[0] for key in chunk.keys}) == 1 for chunk in store.actor._chunks.values())


def test_full_store_evicts_and_the_answers_stay(folder: Path) -> None:
    small = ColdStoreLimits(30 * TINY_BLOCK_BYTES, 20 * TINY_BLOCK_BYTES, 4 * TINY_BLOCK_BYTES)
    store = InProcessStore(small)
    requests = [(prompt, b"") for prompt in drawn(20, 80)] * 2
    expected = expected_of(folder, requests)
    with client_of(store) as tier:
        answers = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)
        assert tier.counters.missed > 0

    assert tokens(answers) == expected
    assert store.actor.stats().evicted_parts_total > 0
    assert store.actor.stats().num_bytes <= small.max_tenant_bytes


def test_a_store_that_is_away_costs_only_the_cache(folder: Path) -> None:
    store = InProcessStore(LIMITS)
    store.is_down = True
    requests = [(prompt, b"") for prompt in drawn(12, 80)]
    with client_of(store) as tier:
        answers = complete(build_engine(config_of(folder, NUM_BLOCKS), tier), requests)
        assert tier.flush(10)
        assert tier.counters.spilled == 0
        assert tier.counters.dropped > 0

    assert tokens(answers) == expected_of(folder, requests)


def complete_on_ranks(
    config: EngineConfig, store: InProcessStore, num_ranks: int, requests: Sequence[Request]
) -> tuple[list[Answer], Engine]:
    """Every rank spills its own part; rank 0 gives the others theirs."""
    ring = open_ring(config, num_ranks)
    engines: list[Engine] = []

    def work(ranks: TorchRanks) -> list[Answer]:
        reader = PlanReader(ring.address, ranks.rank - 1) if ranks.rank else None
        with client_of(store, ranks.rank, ranks.size) as tier:
            runner = build_model_runner(config, ranks, tier)
            ranks.minimum(1)
            if reader is not None:
                with pytest.raises(RankLost, match="rank 0 is gone"):
                    build_follower(runner, reader).run()
                reader.close()
                assert tier.flush(10)
                return []
            ring.seal()
            engines.append(build_leader(runner, config, ranks, ring))
            answers = complete(engines[0], requests)
            for _ in engines[0].spill_cached():
                assert tier.flush(10)
            ring.close()
            return answers

    return run_ranks(num_ranks, work)[0], engines[0]


def test_two_ranks_restore_what_two_ranks_spilled(folder: Path) -> None:
    store = InProcessStore(LIMITS)
    texts = drawn(12, 72)
    requests = [(texts[number * 5 % 12] + [number], b"") for number in range(36)]
    expected = expected_of(folder, requests)
    config = config_of(folder, NUM_BLOCKS, TINY_BLOCK_BYTES // 2)  # of one KV head each

    answers, engine = complete_on_ranks(config, store, 2, requests)
    again, restarted = complete_on_ranks(config, store, 2, requests[-4:])

    assert tokens(answers) == expected
    assert engine.totals.restored_blocks > 0
    assert {rank for _, _, rank in store.actor._places} == {0, 1}
    assert tokens(again) == expected[-4:]
    assert restarted.totals.restored_blocks == 4 * 9
    assert cached(again) == 4 * 72


def test_a_cold_tier_without_a_prefix_cache_is_refused(folder: Path) -> None:
    config = EngineConfig(folder, cache=CacheConfig(enable_prefix_cache=False))
    with (
        client_of(InProcessStore(LIMITS)) as tier,
        pytest.raises(EngineError, match="turn on enable_prefix_cache"),
    ):
        build_engine(config, tier)


@pytest.mark.model
def test_smollm2_over_a_pool_ten_times_too_small(smollm2_path: Path) -> None:
    """Twenty requests, then the same again: nearly all of them comes from the cold tier."""
    from tokenizers import Tokenizer

    from tests.e2e.test_greedy_parity import log_book

    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    texts = [f"Book {number} of the ship. {log_book(4)}" for number in range(20)]
    requests = [(tokenizer.encode(text).ids[:116], b"") for text in texts]
    block_bytes, sizes = 30 * 2 * 16 * 3 * 64 * 4, {"max_model_len": 144, "block_size": 16}
    whole = build_engine(config_of(smollm2_path, 40, block_bytes, **sizes))
    expected = tokens(complete(whole, requests))
    with client_of(InProcessStore(ColdStoreLimits(1 << 30, 1 << 30, 4 << 20))) as tier:
        engine = build_engine(config_of(smollm2_path, 12, block_bytes, **sizes), tier)
        first = complete(engine, requests)
        again = complete(engine, requests)
        counters = tier.counters

    lengths = [len(prompt) + 8 for prompt, _ in requests]
    assert sum(-(-length // 16) for length in lengths) >= 10 * 12
    assert tokens(first) == tokens(again) == expected
    assert min(counters.spilled, counters.restored) >= 100
    assert cached(again) > 0.8 * sum(len(prompt) for prompt, _ in requests)
