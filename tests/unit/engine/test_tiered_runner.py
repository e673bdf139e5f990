"""A model over a tiered cache, step by step: its logits are those of the rule, computed for the
whole text at once; and what cannot have tiers is refused."""

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import build
from engine.build import build_model_runner
from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import CacheTooSmall, EngineError, UnsupportedModel
from engine.execution.model_runner import ModelRunner
from engine.models.decoder import build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import dummy_weights, load_weights
from engine.ranks.group import SingleRank
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_append.reference import turned
from tests.fakes.cold_tier import FakeColdTier
from tests.unit.engine import dense_tiers, tiny_checkpoint
from tests.unit.engine.tiered_plans import TieredPlans
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

TIERS = TierConfig(sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128)
VARIANTS = ["llama", "qwen2, qkv bias", "qwen3, qk norm"]
PROMPT = [(7 * index * index + 3 * index + 5) % 199 for index in range(440)]
ANSWER = [(11 * index * index + index + 3) % 199 for index in range(80)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {variant: tmp_path_factory.mktemp("tiny") for variant in VARIANTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "max_position_embeddings", 640)
        for name, size in (("head_dim", 64), ("num_attention_heads", 4)):
            patch.setitem(SIZES, name, size)
        patch.setitem(tiny_checkpoint.VARIANTS, "qwen2, qkv bias", ("Qwen2", {}))
        for variant, folder in folders.items():
            save_tiny(folder, variant)
    return folders


def config_of(folder: Path, tiers: TierConfig | None = TIERS, **changes: Any) -> EngineConfig:
    cache = CacheConfig(tiers=tiers, kv_cache_bytes=1 << 26)
    scheduler = SchedulerConfig(max_num_sequences=4, max_num_batched_tokens=512)
    return replace(EngineConfig(folder, cache=cache, scheduler=scheduler), **changes)


@torch.inference_mode()
def steps(runner: ModelRunner, chunk_lens: Items[int]) -> torch.Tensor:
    """Logits after the prompt and after each token of the answer but the last."""
    plans = TieredPlans(runner.tier_groups)
    sequence = plans.open(PROMPT)
    logits = []
    for num_tokens in chunk_lens:
        batch = plans.plan((sequence, num_tokens))
        logits.append(runner.forward(batch))
        plans.book(batch)
    for token_id in ANSWER:
        sequence.token_ids.append(token_id)
        batch = plans.plan((sequence, 1))
        logits.append(runner.forward(batch))
        plans.book(batch)
    return torch.cat(logits)


@torch.inference_mode()
def logits_by_rule(folder: Path, tiers: TierConfig, *, are_exact: bool = False) -> torch.Tensor:
    """Of the plain model: queries, keys and values are rotated where they are, not by weights."""
    config = ModelConfig.from_folder(folder)
    decoder = build_decoder(config, load_weights(folder, config, torch.float32))

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, cos, sin = tensors
        keys, values = rotated(turned(key, cos, sin)), rotated(value)
        if not are_exact:
            keys, values = keys.bfloat16(), values.bfloat16()
        num_prompt_tokens = len(tokens) if are_exact else len(PROMPT)
        attended = dense_tiers.attended(
            tiers,
            num_prompt_tokens,
            rotated(turned(query, cos, sin)),
            keys,
            values,
            config.head_dim**-0.5,
        )
        return rotated(attended).float()

    tokens = torch.tensor(PROMPT + ANSWER)
    normed = decoder.forward(tokens, torch.arange(len(tokens)), attend)
    return decoder.logits(normed)[len(PROMPT) - 1 :]


def relative(came: torch.Tensor, expected: torch.Tensor) -> float:
    return float((came - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_rule(variant: str, folders: dict[str, Path]) -> None:
    """But for bf16 numbers that fall to the other side when a sum is rounded otherwise."""
    folder = folders[variant]
    exact = logits_by_rule(folder, TierConfig(exact=True), are_exact=True)
    for cold_format in ("int4", "k8v4", "int8"):
        tiers = replace(TIERS, cold_format=cold_format)
        by_rule = logits_by_rule(folder, tiers)
        came = steps(build_model_runner(config_of(folder, tiers)), [300, 140])
        assert relative(came, by_rule) < 0.02
        assert relative(came, by_rule) < relative(by_rule, exact) / 10


def test_chunks_do_not_change_the_logits(folders: dict[str, Path]) -> None:
    runner = build_model_runner(config_of(folders["qwen3, qk norm"]))
    whole = steps(runner, [440])
    assert relative(steps(runner, [1, 63, 100, 200, 76]), whole) < 0.005


def test_random_weights_are_rotated_too(folders: dict[str, Path]) -> None:
    config = config_of(folders["llama"], load_format="dummy")
    model = ModelConfig.from_folder(folders["llama"])
    ours = build_model_runner(config)._decoder.weights.layers[1].output
    rotating = dummy_weights(model, torch.float32, rotate_values=True).layers[1].output
    assert torch.equal(ours.weight.to_dense(), rotating.weight.to_dense())


def test_the_runner_says_what_its_arenas_are_made_of(folders: dict[str, Path]) -> None:
    config = config_of(folders["llama"])
    runner = build_model_runner(config)
    (group,) = runner.tier_groups
    assert (group.config, group.layers) == (TIERS, (0, 1, 2))
    assert runner.kv_bytes <= 1 << 26
    assert runner.block_size == 64
    # No more than four sequences of 640 tokens could use, with what may still be read.
    ages = TIERS.prefill_ages(639)
    assert group.num_key_slabs == 2 * 4 * TIERS.num_slabs(ages, 640, Part.KEYS)
    assert build_model_runner(config_of(folders["llama"], None)).tier_groups == ()


def test_bytes_that_one_sequence_does_not_fit_into_are_refused_at_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(build, "load_weights")
    config = config_of(folders["llama"])
    with pytest.raises(CacheTooSmall, match="one sequence of max_model_len 640 needs"):
        build_model_runner(replace(config, cache=replace(config.cache, kv_cache_bytes=1 << 19)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_backend": "torch"}, "torch knows no kv_tiers; leave it at auto, or choose"),
        ({"tiers": TierConfig(exact=True)}, "exact are no tiers; leave kv_tiers out"),
        ({"tiers": TierConfig(block_size=32)}, "kv_tiers must have blocks of 64 tokens, got 32"),
        ({"block_size": 32}, "block_size must have blocks of 64 tokens, got 32"),
        ({"num_ranks": 2}, "kv_tiers need one rank, this engine has 2; leave kv_tiers out"),
        ({"cold_tier": FakeColdTier()}, "not of kv_tiers; leave kv_tiers out"),
        (
            {"tiers": replace(TIERS, skip_epsilon=0.03), "deterministic": True},
            "skip_epsilon is not deterministic.*; leave skip_epsilon out, or deterministic",
        ),
        ({"device": "cuda", "dtype": "float32"}, "dtype is torch.float32; set dtype to bfloat16"),
    ],
)
def test_what_tiers_are_not_made_for_is_refused(
    changes: dict[str, Any], named: str, folders: dict[str, Path]
) -> None:
    cache = CacheConfig(tiers=changes.pop("tiers", TIERS), block_size=changes.pop("block_size", 64))
    ranks, cold_tier = SingleRank(size=changes.pop("num_ranks", 1)), changes.pop("cold_tier", None)
    config = EngineConfig(folders["llama"], cache=cache, **changes)
    with pytest.raises(EngineError, match=named):
        build_model_runner(config, ranks, cold_tier)


@pytest.mark.parametrize(
    ("variant", "sizes", "named"),
    [
        (
            "llama",
            {"head_dim": 32},
            "need a head_dim of 64 or 128 or 256, this model's is 32; leave",
        ),
        (
            "llama",
            {"num_attention_heads": 24, "num_key_value_heads": 1},
            "at most 16 heads a KV head, this model has 24; leave kv_tiers out",
        ),
        ("mistral, every layer windowed", {}, "know no sliding windows, this model has them"),
    ],
)
def test_models_without_tiers_are_refused(
    variant: str,
    sizes: dict[str, int],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, size in ({"head_dim": 64} | sizes).items():
        monkeypatch.setitem(SIZES, name, size)
    save_tiny(tmp_path, variant)
    with pytest.raises(UnsupportedModel, match=named):
        build_model_runner(config_of(tmp_path))


def test_heads_that_cannot_skip_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "head_dim", 256)
    save_tiny(tmp_path)
    build_model_runner(config_of(tmp_path, load_format="dummy"))
    named = "skip_epsilon needs a head_dim of 64 or 128, this model's is 256; leave skip_epsilon"
    with pytest.raises(UnsupportedModel, match=named):
        build_model_runner(config_of(tmp_path, replace(TIERS, skip_epsilon=0.03)))
