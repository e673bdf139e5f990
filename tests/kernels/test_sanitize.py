"""How the sanitizers' output is read; the sanitizers themselves need a GPU."""

import pytest

from tests.kernels.gpu.sanitize import Run, num_found, problem

CLEAN = Run("memcheck", "clean", has_bug=False)
PLANTED = Run("racecheck", "planted_race", has_bug=True)
RAN = "ran 11 kernels in 20 calls\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= ERROR SUMMARY: 24 errors\n========= ERROR SUMMARY: 24 errors were not", 48),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", 2),
        ("Segmentation fault", None),
    ],
)
def test_the_summary_is_counted(output: str, found: int | None) -> None:
    assert num_found(output) == found


@pytest.mark.parametrize(
    ("run", "output", "returncode", "expected"),
    [
        (CLEAN, f"{RAN}ERROR SUMMARY: 0 errors", 0, None),
        (CLEAN, f"{RAN}ERROR SUMMARY: 3 errors", 0, "memcheck found 3 in the shipped kernels"),
        (CLEAN, "ERROR SUMMARY: 0 errors", 0, "the kernels did not all run (exit status 0)"),
        (CLEAN, f"{RAN}ERROR SUMMARY: 0 errors", 1, "the kernels did not all run (exit status 1)"),
        (CLEAN, RAN, 0, "memcheck wrote no summary"),
        (PLANTED, "RACECHECK SUMMARY: 1 hazard displayed", 1, None),
        (PLANTED, "RACECHECK SUMMARY: 0 hazards displayed", 0, "racecheck missed the planted bug"),
        (PLANTED, "ImportError", 1, "racecheck wrote no summary"),
    ],
)
def test_an_outcome_is_judged(run: Run, output: str, returncode: int, expected: str | None) -> None:
    assert problem(run, output, returncode) == expected
