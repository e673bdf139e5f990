"""Putting compiled code into a bundle, so that a process that reads it meanwhile stays right."""

import fcntl
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.bundle.bundle import Bundle
from kernels.bundle.index import INDEX, Entry, Form, Index, Key

Where = tuple[Key, int]  # a variant, and the architecture


@dataclass(frozen=True, slots=True)
class Code:
    """A variant compiled for an architecture. is_exact: for `sm_90a` and the like, which no other
    compute capability runs. waits: as of `Entry`. ptx: b"" where it was not kept."""

    cubin: bytes
    ptx: bytes
    is_exact: bool
    waits: bool
    symbol: str
    num_warps: int
    shared_bytes: int


def codes_of(bundle: Bundle) -> dict[Where, Code]:
    """All code of a bundle. Raises CorruptBundle."""
    ptx = {
        (entry.key, entry.arch): bundle.image(entry)
        for entry in bundle.index.entries
        if entry.form == "ptx"
    }
    return {
        (entry.key, entry.arch): Code(
            bundle.image(entry), ptx.get((entry.key, entry.arch), b""), entry.is_exact, entry.waits,
            entry.symbol, entry.num_warps, entry.shared_bytes,
        )
        for entry in bundle.index.entries
        if entry.form == "cubin"
    }  # fmt: skip


def write(
    folder: Path,
    codes: Mapping[Where, Code],
    sources: Mapping[str, Mapping[str, str]],
    triton: str,
    fp_fusion: bool,
) -> Index:
    """New files beside the old ones, for their names tell their content; then the index, at once;
    then the files that it does not name go."""
    contents: dict[tuple[int, Form], bytearray] = defaultdict(bytearray)
    pieces = []
    lowest = _lowest_archs(codes)
    for (key, arch), code in sorted(codes.items(), key=lambda item: (str(item[0][0]), item[0][1])):
        for form, image in _images(code, is_lowest=arch == lowest[key.kernel]):
            content = contents[arch, form]
            pieces.append((key, arch, form, code, len(content), image))
            content += image
    names = {
        (arch, form): f"sm_{arch}-{hashlib.sha256(content).hexdigest()[:12]}.{form}"
        for (arch, form), content in contents.items()
    }
    for which, content in contents.items():
        _write_whole(folder / names[which], content)
    index = Index(
        triton=triton,
        fp_fusion=fp_fusion,
        sources=sources,
        files={names[which]: len(content) for which, content in contents.items()},
        entries=tuple(
            Entry(
                key, arch, form, code.is_exact, code.waits, code.symbol, code.num_warps,
                code.shared_bytes, names[arch, form], offset, len(image),
                hashlib.sha256(image).hexdigest(),
            )
            for key, arch, form, code, offset, image in pieces
        ),
    )  # fmt: skip
    _write_whole(folder / INDEX, index.as_json())
    for file in folder.glob("sm_*-*.*"):
        if file.name not in index.files:
            file.unlink()
    return index


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time writes to a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lowest_archs(codes: Iterable[Where]) -> dict[str, int]:
    lowest: dict[str, int] = {}
    for key, arch in codes:
        lowest[key.kernel] = min(arch, lowest.get(key.kernel, arch))
    return lowest


def _images(code: Code, *, is_lowest: bool) -> Iterator[tuple[Form, bytes]]:
    """The cubin; of the lowest architecture also the PTX, which later GPUs can compile."""
    yield "cubin", code.cubin
    if is_lowest and code.ptx and not code.is_exact:
        yield "ptx", code.ptx


def _write_whole(file: Path, content: bytes | bytearray) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)
