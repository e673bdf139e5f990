"""`python -m kernels build|list|verify`: the bundle of kernels compiled ahead of time."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kernels.bundle.bundle import Bundle
from kernels.bundle.index import default_folder
from kernels.errors import KernelError

Progress = Callable[[int, int, str], None]
BAR_WIDTH = 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="build|list|verify")
    for name, run, text in (
        ("build", build, "compile what is missing or stale; needs no GPU"),
        ("list", list_kernels, "what the bundle holds"),
        ("verify", verify, "whether every variant is there, and every byte as built"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(
            "--out" if name == "build" else "--dir", dest="folder", type=Path,
            default=default_folder(), metavar="DIR", help="the bundle (%(default)s)",
        )  # fmt: skip
        if name != "list":
            command.add_argument(
                "--arch", dest="archs", type=int, action="append", metavar="ARCH",
                help="such as 90 for compute capability 9.0; again for more (80 89 90 100)",
            )  # fmt: skip
        if name == "build":
            command.add_argument(
                "--kernel", dest="kernels", action="append", metavar="NAME",
                help="only this one; again for more",
            )  # fmt: skip
    options = parser.parse_args(arguments)
    # Triton decides when it is imported whether kernels are compiled or interpreted.
    os.environ["TRITON_INTERPRET"] = "0"
    try:
        status: int = options.run(options)
    except KernelError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return status


def build(options: argparse.Namespace) -> int:
    from kernels.bundle import build as building
    from kernels.registry import all_kernels

    unknown = set(options.kernels or ()) - all_kernels().keys()
    if unknown:
        known = ", ".join(all_kernels())
        print(f"no kernel {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    archs = options.archs or building.ARCHS
    progress = _bar() if sys.stderr.isatty() else _lines()
    built = building.build(
        options.folder, options.kernels, archs, progress, num_processes=os.cpu_count() or 1
    )
    print(
        f"{options.folder}: {built.num_compiled} compiled, {built.num_kept} kept, "
        f"{built.num_bytes / 1e6:.1f} MB, {time.monotonic() - started_s:.1f} s"
    )
    return 0


def list_kernels(options: argparse.Namespace) -> int:
    try:
        bundle = Bundle.open(options.folder)
    except FileNotFoundError:
        print(f"{options.folder}: there is no bundle: python -m kernels build", file=sys.stderr)
        return 1
    entries = bundle.index.entries
    print(f"{options.folder}: triton {bundle.index.triton}")
    print(f"{'kernel':24} {'variants':>8} {'bytes':>10}  {'archs':20} state")
    for name in bundle.index.sources:
        mine = [entry for entry in entries if entry.key.kernel == name]
        archs = {entry.arch for entry in mine if entry.form == "cubin"}
        why_stale = bundle.why_stale(name)
        print(
            f"{name:24} {len({entry.key for entry in mine}):8} "
            f"{sum(entry.length for entry in mine):10}  {' '.join(map(str, sorted(archs))):20} "
            f"{f'stale: {why_stale}' if why_stale else 'built'}"
        )
    return 0


def verify(options: argparse.Namespace) -> int:
    from kernels.bundle import build as building

    problems = building.verify(options.folder, options.archs or building.ARCHS)
    for problem in problems:
        print(problem)
    print(f"{options.folder}: {f'{len(problems)} problems' if problems else 'whole'}")
    return 1 if problems else 0


def _bar() -> Progress:
    def progress(done: int, total: int, kernel: str) -> None:
        filled = "#" * (BAR_WIDTH * done // total)
        end = "\n" if done == total else ""
        line = f"\r[{filled:{BAR_WIDTH}}] {done}/{total} {kernel:32}{end}"
        print(line, end="", file=sys.stderr, flush=True)

    return progress


def _lines() -> Progress:
    said = 0

    def progress(done: int, total: int, kernel: str) -> None:
        nonlocal said
        if 10 * done // total > said:
            said = 10 * done // total
            print(f"compiled {done} of {total}, last {kernel}", file=sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    sys.exit(main())
