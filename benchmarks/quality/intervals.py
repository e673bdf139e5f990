"""A mean, and between which values it lies: neighbouring tokens are alike, so whole runs of them
are drawn anew, not tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RUN_TOKENS = 64
NUM_DRAWS = 2000
COVERED = 0.95
SEED = 8

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` to `high` covers `COVERED` of the means of what is drawn."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, windows: Numbers) -> "Interval":
        """windows [num_windows, num_tokens]."""
        starts = range(0, windows.shape[1], RUN_TOKENS)
        runs = [window[start : start + RUN_TOKENS] for window in windows for start in starts]
        sums, sizes = (
            np.array([each.sum() for each in runs]),
            np.array([len(each) for each in runs]),
        )
        drawn = np.random.default_rng(SEED).integers(0, len(runs), (NUM_DRAWS, len(runs)))
        means = sums[drawn].sum(-1) / sizes[drawn].sum(-1)
        low, high = np.quantile(means, ((1 - COVERED) / 2, (1 + COVERED) / 2))
        return cls(float(windows.mean()), float(low), float(high))

    def as_json(self) -> list[float]:
        return [self.mean, self.low, self.high]


def means_along(windows: Numbers, num_tokens: int) -> Sequence[float]:
    """windows [num_windows, all tokens] -> the mean of each stretch of so many tokens, the last of
    which may be shorter."""
    starts = range(0, windows.shape[1], num_tokens)
    return [float(windows[:, start : start + num_tokens].mean()) for start in starts]
