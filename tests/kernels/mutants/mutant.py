"""A mutant is an edit of a kernel's own source, of a module that it imports, or of its entry
point's, run on the op's cases."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernels.checked_interpreter import assert_same, run_checked
from kernels.kernel import Kernel
from kernels.launch import Launcher, launching

ROOT = Path(__file__).parents[3]
DIFFERS = AssertionError  # found by comparison with the reference
Case = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Op:
    """cases: name -> a function that makes the arguments, the same ones each time."""

    folder: str  # below kernels/
    entry: str
    reference: Callable[..., Any]
    cases: Mapping[str, Case]
    rtol: float = 0.0
    atol: float = 0.0

    def source(self, file: str) -> Path:
        return ROOT / "kernels" / self.folder / f"{file}.py"

    def module(self, file: str) -> str:
        return f"kernels.{self.folder.replace('/', '.')}.{file}"

    def importers(self, file: str) -> list[str]:
        """The other modules beside the kernels' that import from it."""
        beside = self.source(file).parent.glob("*.py")
        line = f"from {self.module(file)} import "
        found = [each.stem for each in beside if line in each.read_text()]
        return [each for each in sorted(found) if each != "kernel"]

    def original(self) -> Callable[..., Any]:
        module = importlib.import_module(self.module("api"))
        entry: Callable[..., Any] = getattr(module, self.entry)
        return entry


@dataclass(frozen=True)
class Mutant:
    """caught_by: the failure of the first case that catches it. within: the function to edit."""

    name: str
    old: str
    new: str
    caught_by: type[Exception]
    says: str = ""  # a part of the message
    file: str = "kernel"
    within: str = ""

    def load(self, op: Op, folder: Path) -> ModuleType:
        """The edited module; where the kernels' module imports that, a copy of the kernels' that
        does. The edit must fit the source of today, at one place."""
        source = op.source(self.file).read_text()
        start = source.index(f"def {self.within}(") if self.within else 0
        end = source.find("\n\n\n", start) if self.within else -1
        before, edited, after = source[:start], source[start:end], source[end:]
        if edited.count(self.old) != 1:
            where = op.source(self.file).relative_to(ROOT)
            raise ValueError(f"{self.name}: {self.old!r} is {edited.count(self.old)}x in {where}")
        file = folder / f"mutant_{self.file}.py"
        file.write_text(before + edited.replace(self.old, self.new) + after)
        module = loaded(file)
        if self.file in ("kernel", "api"):
            return module
        importlib.import_module(op.module("kernel"))
        originals = dict(sys.modules)
        try:
            sys.modules[op.module(self.file)] = module
            for each in op.importers(self.file):
                sys.modules[op.module(each)] = loaded(op.source(each))
            return loaded(op.source("kernel"))
        finally:
            sys.modules.update(originals)


def loaded(file: Path) -> ModuleType:
    """A module of its own."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_mutant(op: Op, mutant: Mutant, folder: Path) -> None:
    """Raises what catches it."""
    module = mutant.load(op, folder)
    if mutant.file == "api":
        run_cases(op, getattr(module, op.entry), [])
    else:
        own = [each for each in vars(module).values() if isinstance(each, Kernel)]
        run_cases(op, op.original(), own)


def run_cases(op: Op, entry: Callable[..., Any], instead: Sequence[Kernel]) -> None:
    """instead: kernels that are launched in the place of those of their name."""
    named = {each.name: each for each in instead}

    def way(
        launcher: Launcher, grid: tuple[int, ...], arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        kernel = named.get(launcher.contract.kernel) or launcher.kernel()
        run_checked(kernel, grid, arguments, meta)

    for case in op.cases.values():
        ours, theirs = case(), case()
        with launching(way):
            result = entry(*ours)
        expected = op.reference(*theirs)
        assert_same((result, ours), (expected, theirs), rtol=op.rtol, atol=op.atol)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def far_rows(num_rows: int, stride: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows so far from each other that int32 offsets overflow; what is between is never touched,
    and takes no memory."""
    storage = torch.empty((num_rows - 1) * stride + width, dtype=dtype)
    rows = storage.as_strided((num_rows, width), (stride, 1))
    rows.copy_(normal(num_rows, width, dtype=dtype))
    return rows
