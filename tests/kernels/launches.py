"""What an entry point launches, and whether a bundle has code for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernels.kernel import Variant
from kernels.launch import Grid, Launcher, launching


def launches_of(call: Callable[[], object]) -> list[tuple[Launcher, Variant]]:
    """The launches that a call makes, in order. None of them runs: its results mean nothing."""
    launches = []

    def record(
        launcher: Launcher, grid: Grid, arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        dtypes = tuple(each.dtype for each in arguments if isinstance(each, torch.Tensor))
        is_aligned = launcher.contract.is_aligned(arguments)
        launches.append((launcher, Variant(dtypes, tuple(sorted(meta.items())), is_aligned)))

    with launching(record):
        call()
    return launches


def assert_bundled(call: Callable[[], object]) -> None:
    """Every launch of the call, at least one, has its variant: a GPU host never compiles."""
    launches = launches_of(call)
    assert launches, "the call launched nothing"
    for launcher, variant in launches:
        kernel = launcher.kernel()
        assert variant in kernel.variants, f"{kernel.name} has no variant {variant}"
