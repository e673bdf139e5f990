"""Which files a kernel's code depends on, found without importing them."""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Hints, types and options of a compilation come from here.
COMPILER = "kernels.bundle.compile"
SHAPE_NO_CODE = frozenset(
    {
        "kernels",
        "kernels.bundle",
        "kernels.bundle.bundle",
        "kernels.bundle.index",
        "kernels.bundle.write",
        "kernels.errors",
        "kernels.registry",
    }
)


def sources_of(module: str, root: Path = ROOT) -> dict[str, str]:
    """The sha256 of the files of a kernel's module, of the compiling one, and of all below
    `kernels` that they import, by path."""
    found: dict[str, str] = {}
    seen, waiting = set(SHAPE_NO_CODE), [module, COMPILER]
    while waiting:
        name = waiting.pop()
        file = _file_of(name, root)
        if name in seen or file is None:
            continue
        seen.add(name)
        content = file.read_bytes()
        found[file.relative_to(root).as_posix()] = hashlib.sha256(content).hexdigest()
        waiting += _imports(content, name, file.name == "__init__.py")
    return dict(sorted(found.items()))


def changed_sources(recorded: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """The paths whose files are gone, or not what they were."""
    return [path for path, sha256 in recorded.items() if _sha256(root / path) != sha256]


def _sha256(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def _file_of(module: str, root: Path) -> Path | None:
    path = root.joinpath(*module.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in candidates if file.exists()), None)


@cache
def _imports(content: bytes, module: str, is_package: bool) -> tuple[str, ...]:
    """Modules, and names in modules: those that are no file are dropped later."""
    return tuple(_imported(ast.parse(content), module, is_package))


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level + is_package or None]
                origin = ".".join([*parents, *origin.split(".")]).rstrip(".")
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "kernels")
