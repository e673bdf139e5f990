import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import (
    build_engine,
    build_model_runner,
    cache_address,
    resolve_max_model_len,
    weights_sha256,
)
from engine.cache.tiers import BlockRestore, BlockSpill
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import CacheTooSmall, CheckpointError, EngineError, IntegrityError
from engine.execution.block_payloads import copy_in, copy_out
from engine.execution.kv_tensors import KVTensors, block_bytes, num_blocks_for
from engine.execution.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.sampling_params import SamplingParams
from tests.fakes.cold_tier import FakeColdTier
from tests.unit.engine.hand_batch import GREEDY, book, new_sequence, plan, tiny_runner
from tests.unit.engine.tiny_checkpoint import save_tiny

PROMPT = [5, 17, 40, 40, 3, 99, 7, 8, 120, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return tiny_runner(folder)


def complete(runner: ModelRunner, block_table: list[int], chunk_lens: list[int]) -> list[int]:
    """Greedy tokens after the prompt computed in these chunks, then five decodes."""
    sequence = new_sequence(PROMPT, block_table)
    for num_new_tokens in [*chunk_lens, 1, 1, 1, 1, 1]:
        batch = plan((sequence, num_new_tokens))
        samples = batch.sampling
        sampled = runner.execute(batch)
        book(batch)
        assert len(sampled.token_ids) == len(samples)
        sequence.token_ids += sampled.token_ids
    return sequence.token_ids[len(PROMPT) :]


def test_chunks_and_blocks_do_not_change_the_tokens(runner: ModelRunner) -> None:
    whole = complete(runner, [1, 2], [10])
    assert len(whole) == 6
    assert complete(runner, [6, 3], [1, 4, 1, 3, 1]) == whole
    assert complete(runner, [9, 0], [8, 2]) == whole


def test_blocks_of_a_shared_prefix_are_read_not_written(runner: ModelRunner) -> None:
    whole = complete(runner, [1, 2], [10])
    follower = new_sequence(PROMPT, [1, 5])
    follower.num_computed_tokens = 8  # a prefix hit of one block

    sampled = runner.execute(plan((follower, 2)))

    assert sampled.token_ids == (whole[0],)
    assert complete(runner, [1, 7], [10]) == whole


def test_a_mixed_batch_gives_each_sequence_its_own_token(runner: ModelRunner) -> None:
    alone = complete(runner, [1, 2], [10])
    decoding = new_sequence(PROMPT + alone[:1], [1, 2])
    decoding.num_computed_tokens = len(PROMPT)
    # Position 10 was written by `complete` already, and is written again with the same bytes.
    chunk = new_sequence(PROMPT, [3, 4])
    unfinished = new_sequence(PROMPT, [5, 6])

    sampled = runner.execute(plan((unfinished, 9), (chunk, 10), (decoding, 1)))

    assert sampled.token_ids == (alone[0], alone[1])


def test_a_warm_up_writes_kv_and_samples_nothing(runner: ModelRunner) -> None:
    expected = complete(runner, [1, 2], [10])[0]
    warm_up = new_sequence(PROMPT, [7, 8], SamplingParams(max_tokens=0))

    assert runner.execute(plan((warm_up, 10))).token_ids == ()

    follower = new_sequence(PROMPT, [7, 8])
    follower.num_computed_tokens = 9
    assert runner.execute(plan((follower, 1))).token_ids == (expected,)


def test_stale_blocks_of_others_do_not_leak(runner: ModelRunner) -> None:
    expected = complete(runner, [1, 2], [10])
    stranger = new_sequence([199 - 1 - token for token in PROMPT] * 2, [1, 2, 3])
    runner.execute(plan((stranger, 20)))

    assert complete(runner, [1, 2], [4, 6]) == expected


def test_logprobs_come_with_the_tokens(runner: ModelRunner) -> None:
    sequence = new_sequence(PROMPT, [1, 2], replace(GREEDY, num_logprobs=3))

    sampled = runner.execute(plan((sequence, 10)))

    (logprobs,) = sampled.logprobs
    assert logprobs is not None
    assert logprobs.top[0] == (sampled.token_ids[0], logprobs.logprob)
    assert sum(math.exp(logprob) for _, logprob in logprobs.top) <= 1.0 + 1e-6


def test_bytes_of_a_block(folder: Path) -> None:
    model = ModelConfig.from_folder(folder)
    assert block_bytes(model, 8, torch.float32) == 2 * 3 * 8 * 2 * 16 * 4
    assert block_bytes(model, 8, torch.bfloat16) * 2 == block_bytes(model, 8, torch.float32)
    assert num_blocks_for(10 * 6_144 + 6_143, model, 8, torch.float32) == 10


def config_of(folder: Path, **changes: object) -> EngineConfig:
    cache = CacheConfig(block_size=8)
    return replace(EngineConfig(folder, cache=cache), **changes)  # type: ignore[arg-type]


def run_out(config: EngineConfig) -> tuple[dict[str, list[int]], int]:
    """The greedy tokens of three prompts that come a step apart, and the number of steps."""
    engine = build_engine(config)
    arrivals = [("short", 20), ("long", 150), ("stream", 3)]
    tokens: dict[str, list[int]] = {name: [] for name, _ in arrivals}
    num_steps = 0
    while arrivals or engine.has_work:
        if arrivals:
            name, num_tokens = arrivals.pop()
            prompt = [(7 * index + num_tokens) % 199 for index in range(num_tokens)]
            engine.add(name, prompt, SamplingParams(40, temperature=0.0))
        num_steps += 1
        for output in engine.step().outputs:
            tokens[output.seq_id] += output.token_ids
    return tokens, num_steps


def test_a_time_budget_changes_the_chunks_and_not_the_tokens(folder: Path) -> None:
    config = config_of(folder, check_integrity=True)
    whole, few = run_out(replace(config, scheduler=SchedulerConfig(4, 64)))
    budgeted, many = run_out(replace(config, scheduler=SchedulerConfig(4, 64, 1e-3)))
    assert many > few + 10
    assert budgeted == whole


def test_the_pool_holds_what_all_sequences_could_use_and_no_more(folder: Path) -> None:
    config = config_of(folder, scheduler=SchedulerConfig(max_num_sequences=2), max_model_len=20)
    assert build_model_runner(config).num_blocks == 2 * (3 + 1)

    small = replace(config, cache=CacheConfig(kv_cache_bytes=5 * 6_144, block_size=8))
    assert build_model_runner(small).num_blocks == 5


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers(folder: Path) -> None:
    config = config_of(folder, cache=CacheConfig(kv_cache_bytes=6_144 * 32, block_size=8))
    with pytest.raises(CacheTooSmall, match=r"max_model_len 256 needs 202752 bytes"):
        build_model_runner(config)


def test_a_context_beyond_the_checkpoint_is_refused(folder: Path) -> None:
    model = ModelConfig.from_folder(folder)
    assert resolve_max_model_len(config_of(folder), model) == 256
    for max_model_len in (0, 257):
        with pytest.raises(EngineError, match=f"256.*got {max_model_len}"):
            resolve_max_model_len(config_of(folder, max_model_len=max_model_len), model)


def test_the_address_tells_weights_and_formats_apart(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(folder)
    twin = tmp_path / "twin"
    save_tiny(twin)
    other = tmp_path / "other"
    reference = save_tiny(other)
    with torch.no_grad():
        reference.model.embed_tokens.weight.add_(1.0)
    reference.save_pretrained(other)  # same names, sizes and header; other numbers

    address = cache_address(config_of(folder), model)

    assert cache_address(config_of(twin), model) == address
    assert cache_address(config_of(other), model) != address
    assert cache_address(config_of(folder, dtype="bfloat16"), model) != address
    assert cache_address(config_of(folder, cache=CacheConfig(block_size=16)), model) != address


def test_a_recorded_sha256_is_believed(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    fingerprint = weights_sha256(tmp_path)
    (tmp_path / "flashray.json").write_text(json.dumps({"sha256": "ab" * 32}))
    assert weights_sha256(tmp_path) == "ab" * 32
    (tmp_path / "flashray.json").write_text("{}")
    assert weights_sha256(tmp_path) == fingerprint
    (tmp_path / "flashray.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"flashray\.json"):
        weights_sha256(tmp_path)


def test_the_engine_runs_to_the_end(folder: Path) -> None:
    engine = build_engine(config_of(folder, max_model_len=64, check_integrity=True))
    engine.add("one", PROMPT, replace(GREEDY, max_tokens=6))

    token_ids: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            token_ids += output.token_ids

    assert token_ids == complete(tiny_runner(folder), [1, 2], [10])


def noisy(dtype: torch.dtype, seed: int, num_blocks: int = 40) -> KVTensors:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[torch.Tensor, ...]:
        shape = (num_blocks, 4, 2, 8)
        return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(3))

    return KVTensors(draw(), draw())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_payloads_bring_back_the_same_bits(dtype: torch.dtype) -> None:
    """Forty blocks, more than are staged at once, to other places; the rest stays as it was."""
    kv, other, before = noisy(dtype, 1), noisy(dtype, 2, 50), noisy(dtype, 2, 50)
    sources, targets = list(range(39, -1, -1)), list(range(3, 43))

    payloads = copy_out(kv, sources)
    for tensor in kv.tensors:
        tensor.zero_()  # what was copied out is nobody's any more
    copy_in(other, targets, [memoryview(bytes(payload)) for payload in payloads])

    assert {len(payload) for payload in payloads} == {kv.block_bytes}
    expected = noisy(dtype, 1)
    for found, origin, old in zip(other.tensors, expected.tensors, before.tensors, strict=True):
        assert torch.equal(found[targets], origin[sources])
        assert torch.equal(found[:3], old[:3])
        assert torch.equal(found[43:], old[43:])


def test_a_payload_of_another_size_is_refused() -> None:
    kv = noisy(torch.float32, 1)
    for num_bytes in (1, kv.block_bytes - 1):
        with pytest.raises(IntegrityError, match=f"{num_bytes} bytes came back"):
            copy_in(kv, [0], [bytes(num_bytes)])


def test_spills_are_copied_before_restores_and_both_before_the_step(folder: Path) -> None:
    """The first block is handed over and overwritten at once by what another block held."""
    tier = FakeColdTier()
    runner = build_model_runner(
        EngineConfig(folder, cache=CacheConfig(block_size=8)), cold_tier=tier
    )
    sequence = new_sequence(PROMPT, [1, 2])
    step = plan((sequence, 10))
    expected = runner.execute(step).token_ids
    twin = new_sequence(PROMPT, [3, 4])
    runner.execute(replace(plan((twin, 10)), spills=(BlockSpill(1, b"one", b"red"),)))
    (payload, _crc) = tier.stored[b"red", b"one"]
    runner.execute(plan((new_sequence(PROMPT[::-1], [1, 2]), 10)))  # block 1 is another's

    restored = new_sequence(PROMPT, [1, 5])
    restored.num_computed_tokens = 8
    batch = replace(
        plan((restored, 2)),
        spills=(BlockSpill(1, b"other", b"red"),),
        restores=(BlockRestore(1, b"one", (payload,)),),
    )

    assert runner.execute(batch).token_ids == expected
    assert tier.stored[b"red", b"other"][0] != payload
