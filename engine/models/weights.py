"""Safetensors files of a folder -> one rank's fused weights, checked tensor by tensor.

`Checkpoint.read_into` is the one place where a checkpoint's tensor meets its destination: what a
rank does not hold is never read.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.dummy_weights import DummyCheckpoint
from engine.models.model_config import DTYPES, ModelConfig
from engine.models.quantization import Linear, Pack, packer_of
from engine.models.rotation import packs_of_rotated
from engine.models.shard import Shard, Span, shard_of, whole
from engine.ranks.group import SINGLE_RANK, Ranks
from kernels.errors import ContractError
from kernels.fp8_linear.api import Fp8Linear
from kernels.linear.api import PackedLinear, pack_linear

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PROGRESS_S = 1.0

Packed = TypeVar("Packed")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out_size, in_size]; rows of `qkv` are queries, keys, values, of `gate_up`
    gates, then ups."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocabulary of the rank, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: PackedLinear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def linears(self) -> list[PackedLinear]:
        """All that is not quantised, but for `gate_ups`."""
        layers = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.down)]
        return [*_unquantised(layers), self.lm_head]

    @property
    def gate_ups(self) -> list[PackedLinear]:
        return _unquantised(layer.gate_up for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """What the rank's weights take; a head that is the embedding itself counts once."""
        fields = [self.embedding, self.final_norm, *_parts(self.lm_head)]
        for layer in self.layers:
            for name in layer.__slots__:
                fields += _parts(getattr(layer, name))
        distinct = {id(tensor): tensor for tensor in fields}
        return sum(tensor.numel() * tensor.itemsize for tensor in distinct.values())


def _unquantised(linears: Iterable[Linear]) -> list[PackedLinear]:
    return [each for each in linears if isinstance(each, PackedLinear)]


def _parts(weight: torch.Tensor | Linear | None) -> list[torch.Tensor]:
    parts = [weight]
    if isinstance(weight, PackedLinear):
        parts = [weight.weight, weight.bias]
    elif isinstance(weight, Fp8Linear):
        parts = [weight.weight, weight.scales, weight.bias]
    return [each for each in parts if isinstance(each, torch.Tensor)]


def resolve_dtype(requested: str, checkpoint_dtype: str, device: str) -> torch.dtype:
    """ "auto" is the checkpoint's dtype, and float32 on a CPU. Raises UnsupportedModel."""
    name = requested
    if requested == "auto":
        name = "float32" if torch.device(device).type == "cpu" else checkpoint_dtype
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """Raises CheckpointError when the folder has no safetensors or a shard is missing."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"{index} must be JSON with a weight_map ({exc!r}); download the file again"
            ) from exc
    else:
        names = {SINGLE_FILE}
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} not found; download the checkpoint's safetensors files")
    return files


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    ranks: Ranks = SINGLE_RANK,
    quantization: str | None = None,
    *,
    rotate_values: bool = False,
) -> DecoderWeights:
    """This rank's shard; a matrix that is quantised is so before the next one is read.
    rotate_values: they come rotated, and attention gives rotated ones back. Raises CheckpointError
    naming file and tensor, UnsupportedModel."""
    shard = shard_of(config, ranks)
    with Checkpoint(find_weight_files(folder), dtype, device) as checkpoint:
        weights = _read_weights(checkpoint, shard, _packs(shard, quantization, rotate_values))
        checkpoint.refuse_unread()
    return weights


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    ranks: Ranks = SINGLE_RANK,
    quantization: str | None = None,
    *,
    rotate_values: bool = False,
) -> DecoderWeights:
    """As `load_weights`, of no checkpoint: random numbers."""
    source, shard = DummyCheckpoint(dtype, device), shard_of(config, ranks)
    return _read_weights(source, shard, _packs(shard, quantization, rotate_values))


class Packs(NamedTuple):
    """How the matrices of a layer are kept: queries, keys, values; output projection; the MLP's."""

    qkv: Pack
    output: Pack
    others: Pack


def _packs(shard: Shard, quantization: str | None, rotate_values: bool) -> Packs:
    pack = packer_of(quantization)
    if not rotate_values:
        return Packs(pack, pack, pack)
    return Packs(*packs_of_rotated(pack, shard.local), pack)


class TensorSource(Protocol):
    """See `Checkpoint`."""

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor: ...
    def read(self, name: str, *spans: Span) -> torch.Tensor: ...
    def read_into(self, name: str, destination: torch.Tensor, *spans: Span) -> None: ...
    def ignore(self, name: str) -> None: ...


def _read_weights(source: TensorSource, shard: Shard, packs: Packs) -> DecoderWeights:
    hidden = whole(shard.local.hidden_size)
    embedding = source.read("model.embed_tokens.weight", shard.vocabulary, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layers(source, shard, packs)),
        final_norm=source.read("model.norm.weight", hidden),
        lm_head=_load_lm_head(source, shard, embedding),
    )


def _load_layers(source: TensorSource, shard: Shard, packs: Packs) -> Iterator[LayerWeights]:
    num_layers, said_s = shard.local.num_layers, time.monotonic()
    for index in range(num_layers):
        yield _load_layer(source, shard, index, packs)
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            logger.info("weights: %d of %d layers", index + 1, num_layers)


def _load_layer(checkpoint: TensorSource, shard: Shard, index: int, packs: Packs) -> LayerWeights:
    prefix, config = f"model.layers.{index}", shard.local
    hidden = whole(config.hidden_size)
    qkv = [
        (f"{prefix}.self_attn.{name}_proj", rows)
        for name, rows in (("q", shard.query), ("k", shard.key_value), ("v", shard.key_value))
    ]
    gate_up = [(f"{prefix}.mlp.{name}_proj", shard.inner) for name in ("gate", "up")]
    has_qk_norm = config.architecture.has_qk_norm

    def read_qk_norm(name: str) -> torch.Tensor | None:
        path = f"{prefix}.self_attn.{name}.weight"
        return checkpoint.read(path, whole(config.head_dim)) if has_qk_norm else None

    load = partial(_load_linear, checkpoint)
    return LayerWeights(
        input_norm=checkpoint.read(f"{prefix}.input_layernorm.weight", hidden),
        qkv=load(packs.qkv, qkv, hidden, has_bias=config.architecture.has_qkv_bias),
        q_norm=read_qk_norm("q_norm"),
        k_norm=read_qk_norm("k_norm"),
        output=load(packs.output, [(f"{prefix}.self_attn.o_proj", hidden)], shard.query),
        post_attention_norm=checkpoint.read(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=load(packs.others, gate_up, hidden),
        down=load(packs.others, [(f"{prefix}.mlp.down_proj", hidden)], shard.inner),
    )


def _load_linear(
    checkpoint: TensorSource,
    pack: Callable[[torch.Tensor, torch.Tensor | None], Packed],
    parts: Sequence[tuple[str, Span]],
    columns: Span,
    *,
    has_bias: bool = False,
) -> Packed:
    """Stacks the `parts` (name, rows) along their outputs."""
    out_size = sum(rows.size for _, rows in parts)
    weight = checkpoint.allocate((out_size, columns.size))
    bias = checkpoint.allocate((out_size,)) if has_bias else None
    start = 0
    for name, rows in parts:
        end = start + rows.size
        checkpoint.read_into(f"{name}.weight", weight[start:end], rows, columns)
        if bias is not None:
            checkpoint.read_into(f"{name}.bias", bias[start:end], rows)
        start = end
    try:
        return pack(weight, bias)
    except ContractError as exc:
        names = ", ".join(f"{name}.weight" for name, _ in parts)
        raise UnsupportedModel(
            f"{names}: cannot be quantised ({exc}); leave quantization out"
        ) from exc


def _load_lm_head(checkpoint: TensorSource, shard: Shard, embedding: torch.Tensor) -> PackedLinear:
    """Its products are float32: logits rounded to a narrow dtype would tie."""
    pack = partial(pack_linear, out_dtype=torch.float32)
    if shard.local.tie_embeddings:
        checkpoint.ignore("lm_head.weight")  # some writers store the tied copy as well
        return pack(embedding)
    hidden = whole(shard.local.hidden_size)
    return _load_linear(checkpoint, pack, [("lm_head", shard.vocabulary)], hidden)


class Checkpoint:
    """Open safetensors files, read by tensor name, each at most once."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, device: str) -> None:
        self._files = tuple(files)
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._readers: dict[str, tuple[Path, Any]] = {}  # tensor name -> its file

    def __enter__(self) -> Self:
        for file in self._files:
            try:
                reader = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as exc:
                self._stack.close()
                raise CheckpointError(
                    f"{file} is not a whole safetensors file ({exc}); download it again"
                ) from exc
            self._readers.update((name, (file, reader)) for name in reader.keys())  # noqa: SIM118
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def read(self, name: str, *spans: Span) -> torch.Tensor:
        destination = self.allocate(tuple(span.size for span in spans))
        self.read_into(name, destination, *spans)
        return destination

    def read_into(self, name: str, destination: torch.Tensor, *spans: Span) -> None:
        """`spans`, one a dimension, say which part of the tensor; the rest of the destination
        becomes zero. Raises CheckpointError when it is missing, misshapen or not finite."""
        shape = [span.total for span in spans]
        if name not in self._readers:
            listed = ", ".join(file.name for file in self._files)
            raise CheckpointError(
                f"tensor {name} {shape} is missing from {listed} in {self._files[0].parent}; "
                "the files do not belong to this config.json"
            )
        file, reader = self._readers.pop(name)
        found = list(reader.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{file}: tensor {name} must have shape {shape}, found {found}; "
                "the file does not belong to this config.json"
            )
        _copy_part(reader, name, destination, spans)
        # One pass without a boolean copy: any NaN or infinity survives the sum.
        if not destination.sum(dtype=torch.float32).isfinite():
            raise CheckpointError(
                f"{file}: tensor {name} holds NaN or infinity in {self._dtype}; "
                "download the file again or choose a wider dtype"
            )

    def ignore(self, name: str) -> None:
        self._readers.pop(name, None)

    def refuse_unread(self) -> None:
        """Raises CheckpointError for a tensor nobody asked for, but for stored rope frequencies."""
        for name, (file, _) in sorted(self._readers.items()):
            if not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"{file}: unexpected tensor {name}; "
                    "the file does not belong to this config.json"
                )


def _copy_part(reader: Any, name: str, destination: torch.Tensor, spans: Sequence[Span]) -> None:
    if all(span.is_whole for span in spans):
        destination.copy_(reader.get_tensor(name))
        return
    if any(span.num_held < span.size for span in spans):
        destination.zero_()
    if all(span.num_held for span in spans):
        part = reader.get_slice(name)[tuple(slice(span.start, span.stop) for span in spans)]
        destination[tuple(slice(span.num_held) for span in spans)].copy_(part)
