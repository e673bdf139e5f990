"""Weights in 8-bit floats: what is quantised and what is not, how far the logits then are, and what
is refused."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.build import build_engine, build_model_runner, cache_address
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError, UnsupportedModel
from engine.execution.model_runner import ModelRunner
from engine.models import weights as weights_module
from engine.models.dummy_weights import DummyCheckpoint
from engine.models.model_config import ModelConfig
from engine.models.quantization import refuse_quantization
from engine.models.weights import DecoderWeights, dummy_weights, load_weights
from engine.ranks.group import TorchRanks
from engine.sampling_params import SamplingParams
from kernels.fp8_linear.api import Fp8Linear
from kernels.linear.api import PackedLinear
from tests.unit.engine.hand_batch import new_sequence, plan
from tests.unit.engine.rank_threads import run_ranks
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

FP8_MAX = 448


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    cache = CacheConfig(block_size=8, kv_cache_bytes=1 << 22)
    return EngineConfig(folder, cache=cache, **{"quantization": "fp8", **changes})


def load(folder: Path, quantization: str | None, dtype: torch.dtype) -> DecoderWeights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, dtype, quantization=quantization)


def matrices(weights: DecoderWeights) -> list[Any]:
    return [
        each
        for layer in weights.layers
        for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]


def prompt(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(199, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def last_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    sequence = new_sequence(token_ids, list(range(1, 2 + len(token_ids) // 8)))
    return runner.forward(plan((sequence, len(token_ids))))[0]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row to 8-bit floats and back."""
    scales = x.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


class RoundedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(rounded(x), self.weight, self.bias)


def quantised(model: Any) -> Any:
    """The transformers model with every matrix of its layers in 8-bit floats."""
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(block, name, RoundedLinear(linear))
    return model


@torch.inference_mode()
def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, -1]
    return logits


@pytest.mark.parametrize("variant", ["llama", "qwen2, qkv bias", "qwen3, qk norm"])
@torch.inference_mode()
def test_logits_are_those_of_a_model_with_rounded_matrices(variant: str, tmp_path: Path) -> None:
    model = quantised(save_tiny(tmp_path, variant))
    runner = build_model_runner(config_of(tmp_path))

    errors = []
    for seed in range(6):
        tokens = prompt(30 + seed, seed)
        expected = logits_of(model, tokens)
        errors.append((last_logits(runner, tokens) - expected).norm() / expected.norm())

    # A value on the border between two may fall to either side; what is wrong is off by 20 %.
    assert sorted(errors)[len(errors) // 2] < 1e-3, errors
    assert max(errors) < 0.05, errors


@pytest.fixture
def calm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose weights are no larger than trained ones."""
    monkeypatch.setitem(SIZES, "initializer_range", 0.05)
    monkeypatch.setitem(SIZES, "intermediate_size", 96)
    return save_tiny(tmp_path)


def test_logits_are_within_a_few_percent_of_the_exact_ones(calm: Any, tmp_path: Path) -> None:
    runner = build_model_runner(config_of(tmp_path))

    for seed in range(6):
        tokens = prompt(40, seed)
        logits, exact = last_logits(runner, tokens), logits_of(calm, tokens)
        assert (logits - exact).norm() < 0.1 * exact.norm()
        assert (logits - exact).norm() > 1e-3 * exact.norm()


def test_greedy_tokens_of_the_whole_engine(tmp_path: Path) -> None:
    model = quantised(save_tiny(tmp_path))
    engine = build_engine(config_of(tmp_path, check_integrity=True))
    tokens = prompt(40, seed=9)
    engine.add("one", tokens, SamplingParams(6, temperature=0.0))

    said: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            said += output.token_ids

    for token in said:
        assert token == int(logits_of(model, tokens).argmax())
        tokens.append(token)


@pytest.mark.parametrize("variant", ["llama, tied", "qwen2, qkv bias"])
def test_the_matrices_of_the_layers_take_half_the_bytes_and_nothing_else_changes(
    variant: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, variant)
    ours, theirs = (load(tmp_path, each, torch.bfloat16) for each in ("fp8", None))

    saved = 0
    for one, other in zip(matrices(ours), matrices(theirs), strict=True):
        assert isinstance(one, Fp8Linear)
        assert one.weight.nbytes == other.weight.nbytes // 2
        assert one.bias is None or torch.equal(one.bias, other.bias)
        saved += one.weight.nbytes - one.scales.nbytes
    assert ours.num_bytes == theirs.num_bytes - saved
    assert isinstance(ours.lm_head, PackedLinear)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.layers[0].input_norm, theirs.layers[0].input_norm)


def test_kernels_are_chosen_for_what_is_not_quantised(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    ours, theirs = (load(tmp_path, each, torch.bfloat16) for each in ("fp8", None))

    assert ours.linears == [ours.lm_head]
    assert ours.gate_ups == []
    assert len(theirs.linears) == 3 * 3 + 1
    assert len(theirs.gate_ups) == 3


def test_one_matrix_at_a_time_is_as_wide_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Watched(DummyCheckpoint):
        def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
            nonlocal most
            tensor = super().allocate(shape)
            if len(shape) == 2 and config.vocab_size not in shape:
                alive.append(weakref.ref(tensor))
                most = max(most, sum(each() is not None for each in alive))
            return tensor

    monkeypatch.setattr(weights_module, "DummyCheckpoint", Watched)
    kept = dummy_weights(config, torch.bfloat16, quantization="fp8")

    assert len(alive) == 4 * 3
    assert most == 1
    assert all(each() is None for each in alive), "the wide matrices live on"
    assert all(each.weight.is_contiguous() for each in matrices(kept))


def test_the_address_tells_quantised_from_whole(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    addresses = {
        cache_address(config_of(tmp_path, quantization=each, dtype=dtype), model)
        for each in (None, "fp8")
        for dtype in ("float32", "bfloat16")
    }
    assert len(addresses) == 4


def test_ranks_scale_their_own_parts(calm: Any, tmp_path: Path) -> None:
    tokens = prompt(40, seed=3)
    alone = last_logits(build_model_runner(config_of(tmp_path)), tokens)

    def compute(ranks: TorchRanks) -> torch.Tensor:
        return last_logits(build_model_runner(config_of(tmp_path), ranks), tokens)

    together = run_ranks(2, compute)[0]

    exact = logits_of(calm, tokens)
    assert (together - alone).norm() < 0.1 * exact.norm()
    assert (together - exact).norm() < 0.1 * exact.norm()


def test_a_part_that_16_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path)

    def compute(ranks: TorchRanks) -> None:
        config = ModelConfig.from_folder(tmp_path)
        named = (
            r"layers\.0\.mlp\.down_proj\.weight: cannot be quantised .*multiples of 16, "
            r"came \[48, 40\]\); leave quantization out"
        )
        with pytest.raises(UnsupportedModel, match=named):
            load_weights(tmp_path, config, torch.float32, ranks=ranks, quantization="fp8")

    run_ranks(2, compute)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "int3"}, "quantization must be fp8 or left out, got 'int3'"),
        ({"deterministic": True}, "fp8 is not deterministic.*leave out either"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_weights(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=words):
        build_model_runner(config_of(tmp_path, **changes))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_a_gpu_without_8_bit_floats_is_refused(
    capability: tuple[int, int], capability_is: Callable[[tuple[int, int]], None]
) -> None:
    capability_is(capability)
    with pytest.raises(EngineError, match=rf"capability 8\.9, cuda:1 has 8\.{capability[1]}"):
        refuse_quantization("fp8", torch.bfloat16, "cuda:1", deterministic=False)


def test_a_gpu_computes_in_bfloat16(capability_is: Callable[[tuple[int, int]], None]) -> None:
    capability_is((9, 0))
    refuse_quantization("fp8", torch.bfloat16, "cuda", deterministic=False)
    refuse_quantization(None, torch.float16, "cuda", deterministic=True)
    with pytest.raises(EngineError, match=r"dtype is torch\.float16; set dtype to bfloat16"):
        refuse_quantization("fp8", torch.float16, "cuda", deterministic=False)


@pytest.fixture
def capability_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    def answer(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return answer
