"""A GGUF file becomes a model folder: config and tokenizer through transformers, weights through
the gguf package, dequantised exactly to float32 (what a quantised file means is float32)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.gguf_reader import ReaderField
from safetensors.torch import save_file

from deployments.checkpoint import check_names, check_tensor, expected_shapes
from deployments.errors import ModelFilesError
from deployments.tokenizer_files import save_tokenizer

MAX_SHARD_BYTES = 4 << 30
# llama.cpp stores these with query and key rows interleaved for its own rotary order.
INTERLEAVED_ROTARY = ("llama",)


class CheckedReader(gguf.GGUFReader):
    """A GGUFReader that says which tensor of a truncated file is cut off."""

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        num_bytes = len(self.data)
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind[0]))]
            end = start_offs + int(offset[0]) + int(np.prod(dims)) * block_bytes // block
            if end > num_bytes:
                raise ValueError(
                    f"tensor {bytes(name).decode()} ends at byte {end} but the file has "
                    f"{num_bytes}; is the download complete?"
                )
        super()._build_tensors(start_offs, fields)


def convert_gguf(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model folder. Raises ModelFilesError naming file and tensor."""
    reader = open_gguf(source)
    config = _config(source)
    save_tokenizer(_tokenizer(source), folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    _save_shards(folder, _weights(source, reader, config, progress))


def open_gguf(source: Path) -> gguf.GGUFReader:
    try:
        return CheckedReader(source)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as exc:
        raise ModelFilesError(f"{source}: not a readable GGUF file: {exc}") from exc


def _config(source: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, KeyError) as exc:
        raise ModelFilesError(f"{source}: transformers cannot read its config: {exc}") from exc
    config.architectures = config.architectures or [f"{config.model_type.title()}ForCausalLM"]
    return config


def _tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


def _weights(
    source: Path, reader: gguf.GGUFReader, config: Any, progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    architecture = reader.fields["general.architecture"].contents()
    names = _gguf_names(architecture, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    expected = expected_shapes(config)
    check_names(source, {name: 0 for name in expected if names(name) in stored}, expected)
    for done, (name, shape) in enumerate(expected.items(), start=1):
        tensor = stored[names(name)]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weight = torch.from_numpy(values).reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if architecture in INTERLEAVED_ROTARY:
            weight = _rotary_halves(name, weight, config)
        check_tensor(source, names(name), weight, shape)
        if done % 50 == 0 or done == len(expected):
            progress(f"dequantised {done} of {len(expected)} tensors")
        yield name, weight.contiguous()


def _gguf_names(architecture: str, num_layers: int) -> Callable[[str], str]:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], num_layers)

    def name_in_gguf(name: str) -> str:
        return table.get_name(name, try_suffixes=(".weight", ".bias")) or name

    return name_in_gguf


def _rotary_halves(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Undo llama.cpp's interleaving: rows (pair, half) of each head go back to (half, pair)."""
    if ".self_attn.q_proj." in name:
        num_heads = config.num_attention_heads
    elif ".self_attn.k_proj." in name:
        num_heads = config.num_key_value_heads
    else:
        return weight
    pairs = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2).reshape_as(weight)


def _save_shards(folder: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """One file when it fits, else `model-00001.safetensors`, ... with the usual index."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"model-{len(shards) + 1:05}.safetensors", {"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, weight in weights:
        if pending and sum(w.nbytes for w in pending.values()) + weight.nbytes > MAX_SHARD_BYTES:
            flush()
        pending[name] = weight
        total_bytes += weight.nbytes
    flush()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {
        name: f"model-{number:05}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
