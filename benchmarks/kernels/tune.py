"""`--tune`: every kernel in many forms, compiled just in time; the fastest belongs in its METAS."""

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.command import Progress
from benchmarks.errors import BenchmarkError
from benchmarks.kernels.case import Case
from benchmarks.kernels.timing import graph_us
from kernels.launch import Launcher, launching

Meta = Mapping[str, int]
WARPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Knob:
    """Where the forms of a kernel are declared, and those to try."""

    module: str
    attribute: str
    metas: Sequence[Meta]

    @contextmanager
    def turned_to(self, meta: Meta) -> Iterator[None]:
        module = importlib.import_module(self.module)
        declared = getattr(module, self.attribute)
        # One form, or a table of them.
        turned = meta if isinstance(declared, Mapping) else tuple(meta for _ in declared)
        setattr(module, self.attribute, turned)
        try:
            yield
        finally:
            setattr(module, self.attribute, declared)


def grid(**choices: Sequence[int]) -> list[Meta]:
    return [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]


KNOBS = {
    "rms_norm": Knob(
        "kernels.rms_norm.reference",
        "METAS",
        grid(ROWS=(1, 2, 4), BLOCK=(4096,), num_warps=WARPS),
    ),
    "rms_norm_residual": Knob(
        "kernels.rms_norm.reference", "RESIDUAL_METAS", grid(BLOCK=(4096,), num_warps=WARPS)
    ),
    "silu_mul": Knob(
        "kernels.silu_mul.reference",
        "METAS",
        grid(BLOCK=(1024, 2048, 4096), STREAM=(0, 1), num_warps=(4, 8)),
    ),
    "rotary": Knob(
        "kernels.rotary.reference",
        "METAS",
        grid(HEADS=(4, 8, 16, 32), HALF=(64,), num_warps=(2, 4, 8)),
    ),
    "kv_append": Knob(
        "kernels.kv_append.reference",
        "METAS",
        grid(HEADS=(4, 8, 16), BLOCK=(128,), num_warps=(1, 2, 4, 8)),
    ),
    "rope_append": Knob(
        "kernels.rope_append.reference",
        "METAS",
        grid(HEADS=(4, 8, 16, 32), HALF=(64,), num_warps=(1, 2, 4, 8)),
    ),
    "tiered_append": Knob(
        "kernels.tiered_append.reference",
        "METAS",
        grid(HEADS=(4, 8, 16, 32), SIZE=(128,), num_warps=(1, 2, 4, 8)),
    ),
    "fp8_quantise": Knob(
        "kernels.fp8_quantise.reference", "METAS", grid(BLOCK=(4096,), num_warps=WARPS)
    ),
}


def _just_in_time(
    launcher: Launcher, grid: tuple[int, ...], arguments: Sequence[Any], meta: Meta
) -> None:
    launcher.kernel().launch(grid, arguments, meta)


def tune(case: Case, knob: Knob, copy_bytes_per_us: float, progress: Progress) -> str:
    """The forms from fast to slow, a line each."""
    sets = case.argument_sets()
    results: list[tuple[float, str]] = []
    with launching(_just_in_time):
        for meta in knob.metas:
            words = " ".join(f"{name}={value}" for name, value in meta.items())
            with knob.turned_to(meta):
                try:
                    case.check(case.ours)
                    call_us = graph_us(lambda index: case.ours(*sets[index % len(sets)]))
                except (BenchmarkError, RuntimeError) as exc:
                    progress(f"{case.name} {words}: {exc}")
                    continue
            results.append((call_us / case.units, words))
    lines = [f"{case.name} ({case.shape})"]
    for unit_us, words in sorted(results):
        share = case.num_bytes / case.units / unit_us / copy_bytes_per_us
        lines.append(f"  {unit_us:9.2f} us  {share:5.1%}  {words}")
    return "\n".join(lines)
