"""Every mutant is caught, by what must catch it; the originals, on the same cases, by nothing."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from kernels.registry import kernel_modules
from tests.kernels import mutants
from tests.kernels.mutants.mutant import Mutant, Op, run_cases, run_mutant

TABLES = [
    importlib.import_module(f"{mutants.__name__}.{found.name}")
    for found in pkgutil.iter_modules(mutants.__path__)
    if found.name != "mutant"
]
TABLE: dict[Op, list[Mutant]] = {
    op: mutants for table in TABLES for op, mutants in table.MUTANTS.items()
}
MUTANTS = [
    pytest.param(op, mutant, id=f"{op.entry}: {mutant.name}")
    for op, mutants in TABLE.items()
    for mutant in mutants
]


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.entry)
def test_an_original_passes(op: Op):
    run_cases(op, op.original(), [])


@pytest.mark.parametrize(("op", "mutant"), MUTANTS)
def test_a_mutant_is_caught(op: Op, mutant: Mutant, tmp_path: Path):
    with pytest.raises(Exception) as failure:  # noqa: PT011
        run_mutant(op, mutant, tmp_path)
    assert type(failure.value) is mutant.caught_by, failure.value
    assert mutant.says in str(failure.value)


def test_every_op_has_mutants():
    modules = {module.__name__ for module in kernel_modules()}
    assert {f"kernels.{op.folder.replace('/', '.')}.kernel" for op in TABLE} == modules


def test_an_edit_that_does_not_fit_is_an_error(tmp_path: Path):
    op = next(iter(TABLE))
    with pytest.raises(ValueError, match="'no such text' is 0x in kernels/"):
        run_mutant(op, Mutant("stale", "no such text", "", AssertionError), tmp_path)
