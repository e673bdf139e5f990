"""The engine's steps through the attention kernels, checked, beside plain PyTorch: same logits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.build import build_model_runner
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import EngineError
from engine.execution.attention import ReferenceAttention
from engine.execution.backends import attention_backend
from engine.execution.inputs import build_inputs
from engine.execution.kv_tensors import KVTensors
from engine.execution.model_runner import ModelRunner
from engine.execution.triton_attention import PagedMetadata, PagedRows, TritonAttention
from kernels.checked_interpreter import checked
from tests.kernels.launches import launches_of
from tests.unit.engine.hand_batch import book, new_sequence, plan
from tests.unit.engine.tiny_checkpoint import save_tiny

PROMPT = [(7 * index * index + 3 * index + 5) % 199 for index in range(84)]
VARIANTS = ["llama", "mistral, every layer windowed"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {variant: tmp_path_factory.mktemp("tiny") for variant in VARIANTS}
    for variant, folder in folders.items():
        save_tiny(folder, variant)
    return folders


def runner_of(folder: Path, backend: str) -> ModelRunner:
    config = EngineConfig(
        folder, scheduler=SchedulerConfig(max_num_sequences=4), attention_backend=backend
    )
    return build_model_runner(config)


def steps(runner: ModelRunner) -> Iterator[torch.Tensor]:
    """Logits of a prompt in two chunks, of a follower that shares its first block, of decodes
    beside the chunk of another prompt, and of decodes alone."""
    first = new_sequence(PROMPT[:70], [5, 2])
    for num_tokens in (37, 33):
        batch = plan((first, num_tokens))
        yield runner.forward(batch)
        book(batch)
    follower = new_sequence(PROMPT[:67], [5, 3])
    follower.num_computed_tokens = 64
    batch = plan((follower, 3))
    yield runner.forward(batch)
    book(batch)
    other = new_sequence(PROMPT[::-1][:20], [1])
    short = new_sequence(PROMPT[9:11], [0])
    short.num_computed_tokens = 1  # stored in the step before
    first.token_ids.append(11)
    follower.token_ids.append(12)
    yield runner.forward(plan((new_sequence(PROMPT[9:11], [0]), 1)))
    batch = plan((other, 20), (first, 1), (follower, 1), (short, 1))
    yield runner.forward(batch)
    book(batch)
    for sequence in (first, other):
        sequence.token_ids.append(13)
    yield runner.forward(plan((first, 1), (other, 1)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_those_of_plain_torch(variant: str, folders: dict[str, Path]) -> None:
    ours, theirs = (runner_of(folders[variant], name) for name in ("triton", "torch"))
    for tensor in ours._kv.tensors:
        tensor.fill_(float("nan"))  # what no token was stored in must not be seen

    with torch.inference_mode():
        expected = list(steps(theirs))
        with checked():
            came = list(steps(ours))

    assert [len(each) for each in expected] == [0, 1, 1, 0, 4, 2]
    for one, other in zip(came, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_without_a_gpu_the_ops_run_their_references(folders: dict[str, Path]) -> None:
    ours, theirs = (runner_of(folders["llama"], name) for name in ("triton", "torch"))
    with torch.inference_mode():
        for one, other in zip(steps(ours), steps(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "name", "backend"),
    [
        ("cpu", "auto", ReferenceAttention),
        ("cuda:1", "auto", TritonAttention),
        ("cuda", "torch", ReferenceAttention),
        ("cpu", "triton", TritonAttention),
    ],
)
def test_which_backend_is_taken(device: str, name: str, backend: type) -> None:
    config = EngineConfig(Path("model"), device=device, attention_backend=name)
    assert attention_backend(config) is backend


def test_an_unknown_backend_is_refused_by_its_name() -> None:
    config = EngineConfig(Path("no such folder"), attention_backend="flash")
    with pytest.raises(
        EngineError, match=r"one of auto, triton, vllm_flash_attn, torch, got 'flash'"
    ):
        build_model_runner(config)


def test_each_layer_has_its_own_window() -> None:
    def attended(backend: type[ReferenceAttention] | type[TritonAttention]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape, windows = (3, 64, 2, 16), (None, 3, 30)
        layers = [tuple(torch.zeros(shape) for _ in windows) for _ in "kv"]
        attention = backend(KVTensors(*layers), windows, 0.5)
        chunk, decode = new_sequence(PROMPT[:70], [2, 0]), new_sequence(PROMPT[:1], [1])
        inputs = build_inputs(plan((chunk, 70), (decode, 1)), 64, torch.device("cpu"))
        metadata = attention.prepare(inputs)
        draw = partial(torch.randn, generator=generator)
        *others, last = [
            attention.attend(
                layer,
                *[draw(71, heads, 16) for heads in (6, 2, 2)],
                *[draw(71, 1, 16) for _ in ("cos", "sin")],
                metadata,
            )
            for layer in range(len(windows))
        ]
        return [*others, last[inputs.sampled_rows]]

    for one, other in zip(attended(TritonAttention), attended(ReferenceAttention), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_last_layer_attends_for_the_newest_tokens_alone(deterministic: bool) -> None:
    layers = [tuple(torch.zeros(3, 64, 1, 16) for _ in range(2)) for _ in "kv"]
    attention = TritonAttention(KVTensors(*layers), [None] * 2, 1.0, deterministic=deterministic)
    chunk, decode = new_sequence(PROMPT[:70], [2, 0]), new_sequence(PROMPT[:1], [1])
    inputs = build_inputs(plan((chunk, 70), (decode, 1)), 64, torch.device("cpu"))
    metadata = attention.prepare(inputs)
    heads = torch.zeros(71, 1, 16)

    def kernels_of(layer: int) -> list[str]:
        launches = launches_of(lambda: attention.attend(layer, *[heads] * 5, metadata))
        return [launcher.contract.kernel for launcher, _ in launches]

    assert "paged_prefill" in kernels_of(0)
    assert ("paged_prefill" in kernels_of(1)) == deterministic
    assert kernels_of(1).count("paged_decode") == 2 - deterministic


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_long_context_is_split_unless_bits_must_not_change(deterministic: bool) -> None:
    kv = KVTensors(*[(torch.zeros(1, 64, 1, 16),) for _ in "kv"])
    attention = TritonAttention(kv, [None], 1.0, deterministic=deterministic)
    tables, lens = torch.zeros(1, 64, dtype=torch.int64), torch.tensor([64 * 64])
    starts = torch.tensor([0, 2], dtype=torch.int32)
    chunks = PagedRows(slice(0, 2), tables, lens, starts, (2,))
    metadata = PagedMetadata(torch.tensor([62, 63]), None, chunks)
    heads = torch.zeros(2, 1, 16)

    launches = launches_of(lambda: attention.attend(0, *[heads] * 5, metadata))

    names = [launcher.contract.kernel for launcher, _ in launches]
    split = ["paged_prefill_split", "paged_prefill_merge"]
    assert names == ["rope_append", *(["paged_prefill"] if deterministic else split)]


def test_blocks_that_the_kernels_cannot_read_are_refused(folders: dict[str, Path]) -> None:
    config = EngineConfig(folders["llama"], attention_backend="triton")
    with pytest.raises(EngineError, match="needs blocks of 64 tokens, block_size is 8"):
        build_model_runner(replace(config, cache=CacheConfig(block_size=8)))


@pytest.mark.parametrize("head_dim", [8, 40, 272])
def test_heads_that_the_kernels_cannot_read_are_refused(head_dim: int) -> None:
    kv = KVTensors(*[(torch.zeros(1, 64, 1, head_dim),)] * 2)
    with pytest.raises(EngineError, match=f"that 16 divides, at most 256, .* is {head_dim}"):
        TritonAttention(kv, [None], 1.0)
