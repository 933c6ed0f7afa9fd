"""Student's t for the means of a few values, such as paired differences over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["half_width", "tested"]


def half_width(count: int, level: float = 0.95) -> float:
    """Half the width of the t-interval of ``count`` values, in units of their standard deviation: t / √n."""
    from scipy import stats  # takes a second

    return float(stats.t.ppf((1 + level) / 2, count - 1)) / math.sqrt(count)


def tested(differences: Sequence[float], level: float) -> tuple[float, float, float, float | None]:
    """Return the mean of paired differences, the ends of its t-interval, and p: two-sided, for a mean of zero. If the
    differences are equal up to rounding, the interval is the mean alone, and p is None.

    Raises:
        ValueError: fewer than two differences.
    """
    from scipy import stats

    if len(differences) < 2:
        raise ValueError(f"tested: got {len(differences)} differences, expected at least 2")
    mean = statistics.fmean(differences)
    if math.isclose(min(differences), max(differences), rel_tol=1e-9, abs_tol=1e-12):
        return mean, mean, mean, None
    found = stats.ttest_1samp(differences, 0)
    low, high = found.confidence_interval(level)
    return mean, float(low), float(high), float(found.pvalue)
