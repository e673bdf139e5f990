"""A bundle on disk, opened for launching: which code fits a GPU, and its bytes."""

import hashlib
import mmap
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from kernels.bundle.index import REBUILD, Entry, Index, Key
from kernels.bundle.sources import ROOT, changed_sources
from kernels.errors import CorruptBundle


class Bundle:
    """Read-only, and whole: a build beside it does not change the files it has open."""

    def __init__(self, folder: Path, index: Index, contents: dict[str, mmap.mmap]) -> None:
        self.folder = folder
        self.index = index
        self._contents = contents
        self._entries: dict[Key, list[Entry]] = defaultdict(list)
        for entry in index.entries:
            self._entries[entry.key].append(entry)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises FileNotFoundError where there is no bundle, CorruptBundle."""
        index = Index.read(folder)
        return cls(folder, index, {name: _map(folder / name, n) for name, n in index.files.items()})

    def pick(self, key: Key, capability: int) -> Entry | None:
        """The code that runs best on a GPU of that compute capability, 90 for 9.0."""
        return pick(self._entries.get(key, ()), capability)

    def image(self, entry: Entry) -> bytes:
        """Raises CorruptBundle when the bytes are not those that were built."""
        content = self._contents[entry.file][entry.offset : entry.offset + entry.length]
        came = hashlib.sha256(content).hexdigest()
        if came != entry.sha256:
            raise CorruptBundle(
                f"{self.folder / entry.file}: expected the sha256 {entry.sha256[:12]} of "
                f"{entry.key} for sm_{entry.arch}, came {came[:12]}; {REBUILD}"
            )
        return content

    def why_stale(self, kernel: str, root: Path = ROOT) -> str | None:
        """Why the code of a kernel is not what would be compiled now; None when it is."""
        installed = installed_triton()
        if installed is not None and installed != self.index.triton:
            return f"built by triton {self.index.triton}, installed is {installed}"
        recorded = self.index.sources.get(kernel)
        if recorded is None:
            return "the bundle does not have this kernel"
        changed = changed_sources(recorded, root)
        return f"{', '.join(changed)} changed since" if changed else None


def pick(entries: Iterable[Entry], capability: int) -> Entry | None:
    """A cubin of the very capability, else of the highest lower minor of its major, else PTX."""
    fitting = [entry for entry in entries if fits(entry, capability)]
    return max(fitting, key=lambda entry: (entry.form == "cubin", entry.arch), default=None)


def fits(entry: Entry, capability: int) -> bool:
    if entry.arch == capability:
        return True
    if entry.is_exact or entry.arch > capability:
        return False
    return entry.form == "ptx" or entry.arch // 10 == capability // 10


@cache
def installed_triton() -> str | None:
    """Its version, without importing it; None where a bundle is all there is."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _map(file: Path, size: int) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError) as exc:  # ValueError: it is empty
        raise CorruptBundle(f"{file}: expected {size} bytes, came {exc}; {REBUILD}") from exc
    if len(content) != size:
        came = len(content)
        content.close()
        raise CorruptBundle(f"{file}: expected {size} bytes, came {came}; {REBUILD}")
    return content
