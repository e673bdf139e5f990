"""What an entry point launches, and whether a bundle has code for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.contract import Contract
from kernels.kernel import Variant
from kernels.launch import Grid, Launcher, launching


def form_of(contract: Contract, arguments: Sequence[Any], meta: Mapping[str, int]) -> Variant:
    dtypes = tuple(each.dtype for each in arguments if isinstance(each, torch.Tensor))
    return Variant(dtypes, tuple(sorted(meta.items())), contract.is_aligned(arguments))


def launches_of(call: Callable[[], object]) -> list[tuple[Launcher, Variant]]:
    """The launches that a call makes, in order. None of them runs: its results mean nothing."""
    launches = []

    def record(
        launcher: Launcher, grid: Grid, arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        launches.append((launcher, form_of(launcher.contract, arguments, meta)))

    with launching(record):
        call()
    return launches


def assert_bundled(call: Callable[[], object]) -> None:
    """Every launch of the call, at least one, has its variant, or one for any sizes, which a bundle
    gives as well: a GPU host never compiles."""
    launches = launches_of(call)
    assert launches, "the call launched nothing"
    for launcher, variant in launches:
        assert is_bundled(launcher, variant), f"{launcher.kernel().name} has no variant {variant}"


def is_bundled(launcher: Launcher, variant: Variant) -> bool:
    fitting = {variant, replace(variant, is_aligned=False)}
    return not fitting.isdisjoint(launcher.kernel().variants)
