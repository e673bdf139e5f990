"""A trace says what the engine's attention falls on: as plain softmax over the whole text says it,
over keys as they are stored by then."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import EngineError, InvalidSequence, PromptTooLong
from engine.execution.attention_trace import (
    NUM_FIRST,
    NUM_LAST,
    AttentionTrace,
    DemotedBlocks,
    TierRun,
)
from engine.models.decoder import build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from engine.sampling_params import SamplingParams
from engine.trace import num_steps, trace_attention
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_append.reference import turned
from tests.unit.engine import dense_tiers
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

TIERS = TierConfig(sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128)
PROMPT = [(7 * index * index + 3 * index + 5) % 199 for index in range(441)]
NUM_TOKENS = 80  # across the borders of two blocks
NUM_KV_HEADS, HEAD_DIM = 2, 64
VARIANTS = ("llama", "qwen2, upper layers windowed")

Weights = torch.Tensor  # [num_steps, num_layers, num_kv_heads, most tokens]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {variant: tmp_path_factory.mktemp("tiny") for variant in VARIANTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "max_position_embeddings", 640)
        patch.setitem(SIZES, "num_attention_heads", 4)
        patch.setitem(SIZES, "head_dim", HEAD_DIM)
        patch.setitem(SIZES, "initializer_range", 0.1)
        for variant, folder in folders.items():
            save_tiny(folder, variant)
    return folders


def config_of(folder: Path, tiers: TierConfig | None) -> EngineConfig:
    cache = CacheConfig(tiers=tiers)
    return EngineConfig(folder, cache=cache, scheduler=SchedulerConfig(max_num_batched_tokens=300))


def weights_by_rule(folder: Path, trace: AttentionTrace, tiers: TierConfig | None) -> Weights:
    """Of the plain model over the whole text at once, computed without caches, blocks or steps."""
    config = ModelConfig.from_folder(folder)
    decoder = build_decoder(config, load_weights(folder, config, torch.float32))
    tokens = torch.tensor(PROMPT + list(trace.token_ids))
    found = torch.zeros(NUM_TOKENS, config.num_layers, NUM_KV_HEADS, len(tokens))

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, cos, sin = tensors
        rule = TierConfig(exact=True) if tiers is None else tiers
        if tiers is None:
            query, keys, values = rotary(query, cos, sin), rotary(key, cos, sin), value
        else:
            query, keys = (rotated(turned(each, cos, sin)) for each in (query, key))
            keys, values = keys.bfloat16(), rotated(value).bfloat16()
        aging = dense_tiers.AgingTokens(rule, Part.KEYS, keys)
        window, scale = config.sliding_windows[layer] or len(tokens), config.head_dim**-0.5
        for step in range(NUM_TOKENS):
            position = len(PROMPT) - 1 + step
            ages = rule.decode_ages(position) if step else rule.prefill_ages(position)
            seen = aging.seen(ages, position + 1)
            grouped = query[position].double().unflatten(0, (NUM_KV_HEADS, -1))
            scores = torch.einsum("hgd,khd->hgk", grouped, seen) * scale
            scores[..., : max(position + 1 - window, 0)] = float("-inf")
            found[step, layer, :, : position + 1] = scores.softmax(-1).mean(1)
        if any(config.sliding_windows):
            return _windowed(query * scale, keys, values, window)
        attended = dense_tiers.attended(rule, len(PROMPT), query, keys, values, scale)
        return (attended if tiers is None else rotated(attended)).float()

    with torch.inference_mode():
        decoder.forward(tokens, torch.arange(len(tokens)), attend)
    return found


def _windowed(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    grouped = query.unflatten(1, (NUM_KV_HEADS, -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys)
    distances = torch.arange(len(query))[:, None] - torch.arange(len(query))
    scores = scores.masked_fill((distances < 0) | (distances >= window), float("-inf"))
    return torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values).flatten(1, 2)


def error(trace: AttentionTrace, weights: Weights, layers: slice = slice(None)) -> float:
    """The largest difference of a mass of a block, of the first tokens or of the last."""
    worst = 0.0
    for step, by_token in zip(trace.steps, weights.numpy(), strict=True):
        seen = by_token[:, :, : step.position + 1]
        by_block = np.add.reduceat(seen, np.arange(0, seen.shape[2], 64), axis=2)
        for came, expected in (
            (step.masses, by_block),
            (step.first_masses, seen[..., :NUM_FIRST].sum(2)),
            (step.last_masses, seen[..., -NUM_LAST:].sum(2)),
        ):
            worst = max(worst, float(np.abs(came - expected)[layers].max()))
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_masses_of_an_exact_cache_are_those_of_plain_softmax(
    variant: str, folders: dict[str, Path]
) -> None:
    trace = trace_attention(config_of(folders[variant], None), PROMPT, NUM_TOKENS)
    assert error(trace, weights_by_rule(folders[variant], trace, None)) < 1e-4
    assert trace.tiers == ("exact",)
    assert [run.start for run in (trace.runs(trace.steps[-1], each)[0] for each in range(3))] == [
        520 - (window or 520)
        for window in ModelConfig.from_folder(folders[variant]).sliding_windows
    ]
    assert all(np.abs(trace.by_tier(step).sum(1) - 1).max() < 1e-6 for step in trace.steps)


@pytest.mark.parametrize("cold_format", ["int4", "k8v4", "int8"])
def test_masses_of_tiers_are_those_over_keys_as_they_are_stored(
    cold_format: str, folders: dict[str, Path]
) -> None:
    """Of the first layer: what later ones get is rounded, now and then to the other side."""
    tiers, folder = replace(TIERS, cold_format=cold_format), folders["llama"]
    trace = trace_attention(config_of(folder, tiers), PROMPT, NUM_TOKENS)
    by_rule = weights_by_rule(folder, trace, tiers)
    assert error(trace, by_rule, slice(0, 1)) < 1e-5
    assert error(trace, by_rule) < 0.01
    assert error(trace, weights_by_rule(folder, trace, None), slice(0, 1)) > 1e-4


@pytest.fixture(scope="module")
def trace(folders: dict[str, Path]) -> AttentionTrace:
    return trace_attention(config_of(folders["llama"], TIERS), PROMPT, NUM_TOKENS)


def test_masses_of_a_head_are_one_and_so_are_those_of_its_tiers(trace: AttentionTrace) -> None:
    for step in trace.steps:
        assert step.masses.shape == (3, NUM_KV_HEADS, -(-(step.position + 1) // 64))
        assert np.abs(step.masses.sum(2) - 1).max() < 1e-6
        assert np.abs(trace.by_tier(step).sum(1) - 1).max() < 1e-6
        assert (step.first_masses <= step.masses[..., 0] + 1e-6).all()
    assert np.allclose(trace.by_block.sum(2), 1, atol=1e-6)
    assert (trace.by_block[0, :, 7:] == 0).all()


def test_a_step_is_the_query_of_the_newest_token(trace: AttentionTrace) -> None:
    assert [step.position for step in trace.steps] == list(range(440, 440 + NUM_TOKENS))
    assert [step.is_decode for step in trace.steps] == [False] + [True] * (NUM_TOKENS - 1)
    assert trace.decodes == trace.steps[1:]
    assert len(trace.token_ids) == NUM_TOKENS


def test_tiers_and_their_bytes_are_those_of_the_rule(trace: AttentionTrace) -> None:
    assert trace.layer_groups == ((0, 1, 2),)
    for step in trace.steps:
        rule = TIERS.decode_ages if step.is_decode else TIERS.prefill_ages
        ages, num_blocks = rule(step.position), step.num_blocks
        blocks = [(run.start // 64, -(-run.end // 64)) for run in step.runs[0]]
        assert blocks == [(start, end) for start, end, _ in TIERS.runs(ages, num_blocks)]
    sink, cold, warm, hot = trace.steps[-1].runs[0]
    bf16 = 2 * 2 * HEAD_DIM * NUM_KV_HEADS  # of a token's key and value
    assert (sink.num_bytes, sink.end) == (64 * bf16, 64)
    affine = 4 * (HEAD_DIM + 64) * NUM_KV_HEADS  # of a block: scales and zeros
    assert (cold.num_bytes, cold.end) == (5 * (64 * bf16 * 3 // 8 + affine), 384)
    assert (warm.num_bytes, warm.end) == (64 * bf16 // 2 + affine, 448)
    assert (hot.num_bytes, hot.end) == (72 * bf16, 520)
    assert trace.num_bytes(trace.steps[-1])["hot"] == 3 * hot.num_bytes


def test_an_exact_layer_reads_all_that_its_window_has(folders: dict[str, Path]) -> None:
    trace = trace_attention(config_of(folders[VARIANTS[1]], None), PROMPT, 2)
    token_bytes = 2 * 8 * NUM_KV_HEADS * 4  # float32, of heads of 8 channels
    assert trace.layer_groups == ((0,), (1, 2))
    assert trace.steps[-1].runs == (
        (TierRun("exact", 0, 442, 442 * token_bytes),),
        (TierRun("exact", 442 - 24, 442, 24 * token_bytes),),
    )
    assert trace.num_bytes(trace.steps[-1]) == {"exact": (442 + 2 * 24) * token_bytes}


def test_demotions_are_those_of_the_step(trace: AttentionTrace) -> None:
    """Of the prompt; of what its last tokens saw in bf16 and decodes do not; and of a block that is
    not hot any more, and one that is not warm, each time that a decode begins another one."""
    bf16, int8, int4 = Format
    begun = (
        DemotedBlocks(Part.KEYS, bf16, int8, 1),
        DemotedBlocks(Part.VALUES, bf16, int8, 1),
        DemotedBlocks(Part.VALUES, int8, int4, 1),
    )
    assert {step.position: step.demoted[0] for step in trace.steps if step.demoted[0]} == {
        440: (DemotedBlocks(Part.KEYS, bf16, int8, 3), DemotedBlocks(Part.VALUES, bf16, int4, 3)),
        441: begun[:2],
        448: begun,
        512: begun,
    }


def test_a_short_text_is_all_hot_or_sink(folders: dict[str, Path]) -> None:
    trace = trace_attention(config_of(folders["llama"], TIERS), PROMPT[:60], 8)
    assert [[(run.start, run.end) for run in step.runs[0]] for step in trace.steps[-4::3]] == [
        [(0, 64), (64, 64), (64, 64), (64, 64)],
        [(0, 64), (64, 64), (64, 64), (64, 67)],
    ]
    assert np.abs(trace.by_tier(trace.steps[0]).sum(1) - 1).max() < 1e-6


@pytest.mark.parametrize("tiers", [None, TIERS])
def test_who_is_traced_says_the_same(tiers: TierConfig | None, folders: dict[str, Path]) -> None:
    config = config_of(folders["llama"], tiers)
    steps: list[None] = []
    trace = trace_attention(config, PROMPT, 20, lambda: steps.append(None))
    engine = build_engine(config)
    engine.add("untraced", PROMPT, SamplingParams(max_tokens=20, temperature=0.0))
    said: list[int] = []
    while engine.has_work:
        said += [each for output in engine.step().outputs for each in output.token_ids]
    assert said == list(trace.token_ids)
    assert len(steps) == num_steps(len(PROMPT), 20, config) == 2 + 19


def test_decodes_that_skip_say_what_they_certify(folders: dict[str, Path]) -> None:
    """Beside the masses of the blocks: what was left out is among those of the cold tier."""
    tiers = replace(TIERS, skip_epsilon=0.3)
    trace = trace_attention(config_of(folders["llama"], tiers), PROMPT, 20)
    assert trace.steps[0].certificates is None
    num_left_out = 0
    for step in trace.decodes:
        found = step.certificates
        assert found is not None
        assert found.shares.shape == (3, 4)
        assert found.left_out.shape == (3, NUM_KV_HEADS)
        assert ((found.shares > 0).reshape(3, 2, 2).all(2) == (found.left_out > 0)).all()
        assert found.shares.max() <= 0.3
        cold = step.runs[0][1]
        masses = step.masses[:, :, cold.start // 64 : cold.end // 64]
        lightest = np.sort(masses, 2).cumsum(2)
        for layer, head in np.ndindex(3, NUM_KV_HEADS):
            number = found.left_out[layer, head]
            if number:
                shares = found.shares[layer, 2 * head : 2 * head + 2].mean()
                assert lightest[layer, head, number - 1] <= shares
                num_left_out += number
    assert num_left_out > 0
    assert all(step.certificates is None for step in _plain(folders).steps)


def _plain(folders: dict[str, Path]) -> AttentionTrace:
    return trace_attention(config_of(folders["llama"], TIERS), PROMPT, 3)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens", "refusal"),
    [(0, 4, InvalidSequence), (600, 41, PromptTooLong)],
)
def test_what_cannot_run_is_refused(
    num_prompt_tokens: int, num_tokens: int, refusal: type[Exception], folders: dict[str, Path]
) -> None:
    prompt = (PROMPT * 2)[:num_prompt_tokens]
    with pytest.raises(refusal):
        trace_attention(config_of(folders["llama"], TIERS), prompt, num_tokens)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[0].self_attn, name).weight.mul_(1e25)
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="not finite on this text; verify the model's files"):
        trace_attention(config_of(tmp_path, None), PROMPT[:70], 3)
