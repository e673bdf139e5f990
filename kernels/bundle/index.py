"""What a bundle says of itself: `index.json`, which names every piece of code in its files."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kernels.errors import CorruptBundle

# Raised when what a bundle says, or means, changes.
FORMAT = 2
INDEX = "index.json"
REBUILD = "build it anew: python -m kernels build"

Form = Literal["cubin", "ptx"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """One variant of a kernel, as a launch can tell it.

    dtypes: such as "bfloat16", of the tensors in the contract's order.
    meta: constexprs and launch options, sorted by name.
    is_aligned: compiled for sizes and strides that are multiples of 16 only.
    """

    kernel: str
    dtypes: tuple[str, ...]
    meta: tuple[tuple[str, int], ...]
    is_aligned: bool

    def __str__(self) -> str:
        meta = " ".join(f"{name}={value}" for name, value in self.meta)
        aligned = "aligned" if self.is_aligned else "any sizes"
        return f"{self.kernel}({', '.join(self.dtypes)}; {meta}; {aligned})"


@dataclass(frozen=True, slots=True)
class Entry:
    """The code of one variant for one architecture: `length` bytes of `file` from `offset` on.

    arch: 90 for compute capability 9.0.
    is_exact: runs on that capability alone, for it was compiled for `sm_90a` and the like.
    waits: for the kernels before it, itself (`kernels.dependent_launch`).
    """

    key: Key
    arch: int
    form: Form
    is_exact: bool
    waits: bool
    symbol: str
    num_warps: int
    shared_bytes: int
    file: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """sources: of each kernel, the sha256 of the files that its code depends on, by path.
    files: their sizes in bytes, by name."""

    triton: str
    fp_fusion: bool
    sources: Mapping[str, Mapping[str, str]]
    files: Mapping[str, int]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Raises FileNotFoundError where there is no bundle, CorruptBundle."""
        file = folder / INDEX
        try:
            content = json.loads(file.read_bytes())
        except ValueError as exc:
            raise CorruptBundle(f"{file}: expected JSON, came {exc}; {REBUILD}") from exc
        try:
            if content["format"] != FORMAT:
                raise CorruptBundle(
                    f"{file}: expected format {FORMAT}, came {content['format']!r}; {REBUILD}"
                )
            index = cls(
                triton=_typed(str, content["triton"]),
                fp_fusion=_typed(bool, content["fp_fusion"]),
                sources={name: dict(each) for name, each in content["sources"].items()},
                files={name: _typed(int, size) for name, size in content["files"].items()},
                entries=tuple(_entry(each) for each in content["entries"]),
            )
            index.check()
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
            raise CorruptBundle(
                f"{file}: expected an index of format {FORMAT}, came {problem}; {REBUILD}"
            ) from exc
        return index

    def as_json(self) -> bytes:
        content = {
            "format": FORMAT,
            "triton": self.triton,
            "fp_fusion": self.fp_fusion,
            "sources": self.sources,
            "files": self.files,
            "entries": [_record(entry) for entry in self.entries],
        }
        return json.dumps(content, indent=1).encode()

    def check(self) -> None:
        """Raises ValueError when an entry points outside its file."""
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"the file name {name!r}")
        for entry in self.entries:
            if entry.key.kernel not in self.sources:
                raise ValueError(f"{entry.key} without its sources")
            end = entry.offset + entry.length
            if not 0 <= entry.offset < end <= self.files.get(entry.file, 0):
                raise ValueError(f"{entry.key} at {entry.offset}..{end} of {entry.file}")


def default_folder() -> Path:
    if named := os.environ.get("FLASHRAY_KERNEL_BUNDLE"):
        return Path(named).expanduser()
    cache = os.environ.get("FLASHRAY_CACHE", "~/.cache/flashray")
    return Path(cache).expanduser() / "kernels"


def _record(entry: Entry) -> dict[str, Any]:
    record = asdict(entry)
    key: dict[str, Any] = record.pop("key")
    return key | {"meta": dict(entry.key.meta)} | record


def _entry(record: Mapping[str, Any]) -> Entry:
    if record["form"] not in ("cubin", "ptx"):
        raise ValueError(f"the form {record['form']!r}")
    key = Key(
        _typed(str, record["kernel"]),
        tuple(_typed(str, each) for each in _typed(list, record["dtypes"])),
        tuple(sorted(record["meta"].items())),
        _typed(bool, record["is_aligned"]),
    )
    return Entry(
        key=key,
        arch=_typed(int, record["arch"]),
        form=record["form"],
        is_exact=_typed(bool, record["is_exact"]),
        waits=_typed(bool, record["waits"]),
        symbol=_typed(str, record["symbol"]),
        num_warps=_typed(int, record["num_warps"]),
        shared_bytes=_typed(int, record["shared_bytes"]),
        file=_typed(str, record["file"]),
        offset=_typed(int, record["offset"]),
        length=_typed(int, record["length"]),
        sha256=_typed(str, record["sha256"]),
    )


def _typed(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where a {kind.__name__} belongs")
    return value
