"""A bundle of every variant of the registered kernels: what is there and still good is kept."""

import inspect
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from kernels.bundle.bundle import Bundle, installed_triton
from kernels.bundle.compile import Task, compiled
from kernels.bundle.index import Key
from kernels.bundle.sources import sources_of
from kernels.bundle.write import Code, Where, codes_of, locked, write
from kernels.errors import BundleError, CorruptBundle
from kernels.kernel import FP_FUSION, Kernel, Variant
from kernels.registry import all_kernels

ARCHS = (80, 89, 90, 100)
MIN_TASKS_TO_FORK = 8

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Built:
    num_compiled: int
    num_kept: int
    num_bytes: int


def build(
    folder: Path,
    names: Collection[str] | None = None,
    archs: Sequence[int] = ARCHS,
    progress: Progress = lambda done, total, kernel: None,
    num_processes: int = 1,
) -> Built:
    """Bring the variants of these kernels (all, if None) for `archs` into the bundle in `folder`,
    which need not exist. What else it holds stays where it is still good. Several processes are
    forked from this one, which must have no other Python thread then. Raises BundleError."""
    chosen = [all_kernels()[name] for name in names or all_kernels()]
    wanted = {
        (key_of(kernel, variant), arch): Task(kernel.name, variant, arch)
        for kernel in chosen
        for variant in kernel.variants
        for arch in archs
    }
    with locked(folder):
        codes = _still_good(folder)
        tasks = {where: task for where, task in wanted.items() if where not in codes}
        for done, (where, code) in enumerate(_compile_all(tasks, num_processes), 1):
            codes[where] = code
            progress(done, len(tasks), where[0].kernel)
        sources = {name: _sources(name) for name in sorted({key.kernel for key, _ in codes})}
        index = write(folder, codes, sources, installed_triton() or "", FP_FUSION)
    return Built(len(tasks), len(wanted) - len(tasks), sum(index.files.values()))


def verify(folder: Path, archs: Sequence[int] = ARCHS) -> list[str]:
    """What is wrong with a bundle, in words: nothing, if it has all variants for `archs`."""
    try:
        bundle = Bundle.open(folder)
        for entry in bundle.index.entries:
            bundle.image(entry)
    except FileNotFoundError:
        return [f"{folder}: there is no bundle"]
    except CorruptBundle as exc:
        return [str(exc)]
    has = {(entry.key, entry.arch) for entry in bundle.index.entries if entry.form == "cubin"}
    problems = []
    for kernel in all_kernels().values():
        if why := bundle.why_stale(kernel.name):
            problems.append(f"{kernel.name}: stale: {why}")
            continue
        problems += [
            f"{key_of(kernel, variant)}: missing for sm_{arch}"
            for variant in kernel.variants
            for arch in archs
            if (key_of(kernel, variant), arch) not in has
        ]
    return problems


def key_of(kernel: Kernel, variant: Variant) -> Key:
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in variant.dtypes)
    return Key(kernel.name, dtypes, variant.meta, variant.is_aligned)


def _still_good(folder: Path) -> dict[Where, Code]:
    """Of the bundle that is there, what would be compiled to the same."""
    try:
        bundle = Bundle.open(folder)
        codes = codes_of(bundle)
    except (FileNotFoundError, CorruptBundle):
        return {}
    if bundle.index.fp_fusion != FP_FUSION:
        return {}
    keys = {
        key_of(kernel, variant)
        for kernel in all_kernels().values()
        if bundle.why_stale(kernel.name) is None
        for variant in kernel.variants
    }
    return {(key, arch): code for (key, arch), code in codes.items() if key in keys}


def _sources(kernel: str) -> dict[str, str]:
    return sources_of(all_kernels()[kernel].function.__module__)


def _source_length(task: Task) -> int:
    """What takes long to compile is long to read."""
    return len(inspect.getsource(all_kernels()[task.kernel].function))


def _compile_all(tasks: Mapping[Where, Task], num_processes: int) -> Iterator[tuple[Where, Code]]:
    if num_processes == 1 or len(tasks) < MIN_TASKS_TO_FORK:
        yield from ((where, compiled(task)) for where, task in tasks.items())
        return
    longest_first = sorted(tasks.items(), key=lambda item: _source_length(item[1]), reverse=True)
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(compiled, task): where for where, task in longest_first}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as exc:
            raise BundleError(
                f"a process that compiled was ended, for want of memory? {exc}"
            ) from exc
        finally:
            pool.shutdown(cancel_futures=True)
