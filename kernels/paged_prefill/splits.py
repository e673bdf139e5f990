"""Among how many programs the keys of a tile of rows are shared, so that few rows fill a GPU."""

from kernels.launch import cdiv

MIN_TOKENS = 1024  # of a split: fewer take less time than a merge
FULL = 0.8  # of a wave: enough rows to leave whole
MAX_WAVES = 3  # of what all splits together may take: partial results are memory
NEARLY = 0.9


def fitting_splits(max_tokens: int, num_programs: int, max_programs: int) -> int:
    """The fewest whose waves are nearly as full as any number's: `max_programs` run at once, and
    one more takes the time of another wave. Each of `num_programs` reads at most `max_tokens`."""
    if not 0 < num_programs < FULL * max_programs:
        return 1
    most = max(1, min(max_tokens // MIN_TOKENS, MAX_WAVES * max_programs // num_programs))
    fullness = [_fullness(splits * num_programs, max_programs) for splits in range(1, most + 1)]
    return next(splits for splits, each in enumerate(fullness, 1) if each >= NEARLY * max(fullness))


def _fullness(num_programs: int, max_programs: int) -> float:
    return num_programs / (cdiv(num_programs, max_programs) * max_programs)
