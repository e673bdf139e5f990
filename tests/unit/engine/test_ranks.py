"""Several ranks compute what one computes: every architecture, in threads of this process."""

import threading
from pathlib import Path

import pytest
import torch

from engine.build import (
    build_engine,
    build_follower,
    build_leader,
    build_model_runner,
    cache_address,
    open_ring,
)
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import EngineError, RankLost, UnsupportedModel
from engine.execution.model_runner import ModelRunner
from engine.grammar import Grammar, GrammarCompiler, GrammarKind
from engine.models.model_config import ModelConfig
from engine.models.shard import shard_of
from engine.ranks.group import RankOptions, SingleRank, TorchRanks, connect_store, serve_store
from engine.ranks.plan_ring import PlanReader
from engine.sampling_params import SamplingParams
from tests.fakes.grammar import STOP, FakeGrammars
from tests.unit.engine.hand_batch import new_sequence, plan
from tests.unit.engine.rank_threads import run_ranks
from tests.unit.engine.tiny_checkpoint import VARIANTS, save_tiny

PROMPT = [5, 17, 40, 40, 3, 99, 7, 8, 120, 33, 198, 0]
# 6 heads and 2 KV heads: 2 ranks share the KV heads out, 6 hold copies of them. The vocabulary of
# 199 divides by none, the MLP's 80 not by 6.
SIZES = (2, 6)


def config_of(folder: Path, **cache: int) -> EngineConfig:
    return EngineConfig(
        folder,
        max_model_len=96,
        cache=CacheConfig(**{"block_size": 8} | cache),
        scheduler=SchedulerConfig(4, 16),
        check_integrity=True,
    )


def logits_of(runner: ModelRunner) -> torch.Tensor:
    first, second = new_sequence(PROMPT, [1, 2]), new_sequence(PROMPT[::-1], [3, 4])
    return runner.forward(plan((first, 12), (second, 12)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_one_rank(variant: str, size: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, variant)
    config = config_of(tmp_path)
    whole = logits_of(build_model_runner(config))

    parts = run_ranks(size, lambda ranks: logits_of(build_model_runner(config, ranks)))

    torch.testing.assert_close(parts[0], whole, atol=2e-4, rtol=1e-4)
    assert parts[1].shape == (2, -(-199 // size))


def complete(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    completions: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            completions[int(output.seq_id)] += output.token_ids
    return completions


def complete_on_ranks(
    config: EngineConfig,
    size: int,
    prompts: list[list[int]],
    params: SamplingParams,
    grammars: GrammarCompiler | None = None,
) -> tuple[list[list[int]], Engine]:
    """Rank 0 leads and then closes the ring, which ends the others."""
    ring = open_ring(config, size)
    engines: list[Engine] = []

    def work(ranks: TorchRanks) -> list[list[int]]:
        reader = PlanReader(ring.address, ranks.rank - 1) if ranks.rank else None
        runner = build_model_runner(config, ranks)
        ranks.minimum(1)
        if reader is not None:
            with pytest.raises(RankLost, match="rank 0 is gone"):
                build_follower(runner, reader).run()
            reader.close()
            return []
        ring.seal()
        engines.append(build_leader(runner, config, ranks, ring, grammars))
        completions = complete(engines[0], prompts, params)
        ring.close()
        return completions

    return run_ranks(size, work)[0], engines[0]


@pytest.mark.parametrize(("size", "temperature"), [(2, 0.0), (2, 1.0), (6, 0.0)])
def test_the_whole_engine_on_ranks(size: int, temperature: float, tmp_path: Path) -> None:
    """Chunked prefills, a shared prefix and preemption, with plans through the ring."""
    save_tiny(tmp_path, "qwen3, qk norm")
    prompts = [PROMPT * repeats for repeats in (1, 2, 4, 4, 3, 1)]
    params = SamplingParams(24, temperature=temperature, seed=3)
    block_bytes = 3 * 2 * 8 * 2 * 16 * 4
    one = config_of(tmp_path, kv_cache_bytes=14 * block_bytes)
    many = config_of(tmp_path, kv_cache_bytes=14 * block_bytes // 2)  # of one KV head each

    expected = complete(build_engine(one), prompts, params)
    completions, engine = complete_on_ranks(many, size, prompts, params)

    assert completions == expected
    assert engine.stats.num_blocks == 14
    assert engine.totals.preemptions > 0


def test_rank_0_alone_knows_of_grammars(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = config_of(tmp_path)
    grammar = Grammar(GrammarKind.REGEX, ",".join(f"{id_} {id_ + 50}" for id_ in range(10, 20)))
    params = SamplingParams(24, seed=3, stop_token_ids=frozenset({STOP}), grammar=grammar)
    prompts = [PROMPT, PROMPT[::-1]]

    expected = complete(build_engine(config, grammars=FakeGrammars()), prompts, params)
    completions, _ = complete_on_ranks(config, 2, prompts, params, FakeGrammars())

    assert completions == expected
    for completion in completions:
        assert completion[-1] == STOP
        choices = zip(completion[:-1], range(10, 20), strict=True)
        assert all(token_id in (id_, id_ + 50) for token_id, id_ in choices)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_holds_the_same_bytes_and_its_part(size: int, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = config_of(tmp_path)
    whole = build_model_runner(config)

    def measure(ranks: TorchRanks) -> tuple[int, int]:
        runner = build_model_runner(config, ranks)
        return runner.weight_bytes, runner.kv_bytes

    measured = run_ranks(size, measure)

    assert len(set(measured)) == 1
    weight_bytes, kv_bytes = measured[0]
    assert kv_bytes * 2 == whole.kv_bytes  # two KV heads: from then on, copies
    assert whole.weight_bytes / size <= weight_bytes < 1.2 * whole.weight_bytes / min(size, 3)


def test_the_pool_has_the_blocks_of_the_poorest_rank(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    block_bytes = 3 * 2 * 8 * 1 * 16 * 4

    def count_blocks(ranks: TorchRanks) -> int:
        config = config_of(tmp_path, kv_cache_bytes=(20 + 3 * ranks.rank) * block_bytes)
        return build_model_runner(config, ranks).num_blocks

    assert run_ranks(2, count_blocks) == [20, 20]


def test_heads_that_cannot_be_dealt_out_are_refused_with_what_works(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    for size in (4, 5, 12):
        with pytest.raises(UnsupportedModel, match=rf"to {size} ranks.* one of 1, 2, 6$"):
            shard_of(model, SingleRank(0, size))


def test_the_address_tells_ranks_apart(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config, model = config_of(tmp_path), ModelConfig.from_folder(tmp_path)
    places = [SingleRank(0, 1), SingleRank(0, 2), SingleRank(1, 2)]
    assert len({cache_address(config, model, place) for place in places}) == 3


def test_a_rank_that_is_gone_is_an_error_to_the_others() -> None:
    has_left = threading.Event()

    def work(ranks: TorchRanks) -> None:
        if ranks.rank == 1:
            ranks.close()
            has_left.set()
            return
        assert has_left.wait(10)
        with pytest.raises(RankLost, match="rank 0 of 2 lost another rank"):
            ranks.all_reduce(torch.ones(3))

    run_ranks(2, work)


def test_ranks_meet_on_loopback_only() -> None:
    import psutil

    options = RankOptions(0, 2, timeout_s=5.0)
    before = {each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"}
    store = serve_store(options)
    other = connect_store(RankOptions(1, 2, timeout_s=5.0), store.port)
    other.set("greeting", "hello")
    assert store.get("greeting") == b"hello"
    opened = {each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"}
    assert {address.ip for address in opened - before} == {"127.0.0.1"}


def test_no_rank_0_is_an_error() -> None:
    with pytest.raises(EngineError, match="found no rank 0 at port"):
        connect_store(RankOptions(1, 2, timeout_s=1.0), 9)
