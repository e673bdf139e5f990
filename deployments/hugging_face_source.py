"""A Hugging Face folder becomes a model folder: every weight is checked where it lies and linked,
not copied; the tokenizer and configs are small and copied. Without weights, these alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deployments.checkpoint import check_names, check_tensor, expected_shapes
from deployments.errors import ModelFilesError
from deployments.tokenizer_files import save_tokenizer

INDEX = "model.safetensors.index.json"


def convert_hugging_face(
    source: Path, folder: Path, with_weights: bool, progress: Callable[[str], None]
) -> None:
    """Check the checkpoint and build the model folder. Raises ModelFilesError."""
    config = _load(source, "AutoConfig")
    if with_weights:
        dtypes = _check_weights(source, expected_shapes(config), progress)
        config.dtype = _common_dtype(source, dtypes)
        for file in weight_files(source):
            (folder / file.name).symlink_to(file)
    config.save_pretrained(folder)
    save_tokenizer(_load(source, "AutoTokenizer"), folder)
    for name in ("generation_config.json", INDEX) if with_weights else ("generation_config.json",):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def weight_files(source: Path) -> list[Path]:
    """The safetensors files of the checkpoint: those its index names, else all of them."""
    index = source / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as exc:
            raise ModelFilesError(f"{index}: not a safetensors index: {exc}") from exc
    else:
        names = sorted(file.name for file in source.glob("*.safetensors"))
    if not names:
        raise ModelFilesError(
            f"{source}: no .safetensors file; convert a .bin checkpoint with "
            "transformers' save_pretrained first"
        )
    files = [source / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelFilesError(f"{file}: named by {INDEX} but missing")
    return files


def _load(source: Path, auto_class: str) -> Any:
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelFilesError(f"{source}: {auto_class} cannot read it: {exc}") from exc


def _check_weights(
    source: Path, shapes: dict[str, tuple[int, ...]], progress: Callable[[str], None]
) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    files = weight_files(source)
    for number, file in enumerate(files, start=1):
        progress(f"checking weights, file {number} of {len(files)}: {file.name}")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if name in shapes:
                        tensor = tensors.get_tensor(name)
                        check_tensor(file, name, tensor, shapes[name])
                        dtypes[name] = tensor.dtype
        except (SafetensorError, OSError) as exc:
            raise ModelFilesError(f"{file}: {_first_cut_tensor(file)}{exc}") from exc
    check_names(source, dtypes, shapes)
    return dtypes


def _first_cut_tensor(file: Path) -> str:
    """Names the first tensor that a truncated file no longer holds, or nothing."""
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
        held = file.stat().st_size - 8 - header_bytes
        ends = {
            name: entry["data_offsets"][1]
            for name, entry in header.items()
            if name != "__metadata__"
        }
        cut = min((name for name, end in ends.items() if end > held), key=ends.__getitem__)
    except (ValueError, KeyError, TypeError, OSError, OverflowError, MemoryError):
        return ""
    return f"tensor {cut} is cut off ({file.stat().st_size} bytes on disk): "


def _common_dtype(source: Path, dtypes: dict[str, torch.dtype]) -> torch.dtype:
    """The dtype most parameters have. float8 and integer checkpoints were refused before."""
    counts: dict[torch.dtype, int] = {}
    for dtype in dtypes.values():
        counts[dtype] = counts.get(dtype, 0) + 1
    dtype = max(counts, key=counts.__getitem__)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelFilesError(f"{source}: weights are {dtype}; expected float32, bfloat16, float16")
    return dtype
