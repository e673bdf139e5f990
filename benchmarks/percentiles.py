"""Percentiles of samples, by linear interpolation between neighbours."""

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """Raises ValueError for no samples, or a percent outside [0, 100]."""
    if not samples or not 0 <= percent <= 100:
        raise ValueError(
            f"expected samples and a percent in [0, 100], got {len(samples)} and {percent}"
        )
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
