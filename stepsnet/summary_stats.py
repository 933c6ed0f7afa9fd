"""Summary statistics as numbers and as text.

Results over seeds are given as mean ± sample standard deviation, timings as median and quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["format_mean_std", "format_quartiles", "quartiles"]


def format_mean_std(values: Sequence[float], spec: str = ".2f", unit: str = "", std_spec: str | None = None) -> str:
    """Mean ± sample standard deviation, such as ``71.0 ± 1.8%``; of one value there is no deviation.

    Args:
        spec: the format of the mean, and of the deviation unless ``std_spec`` gives another one.
        unit: written after both, as it stands.
    """
    deviation = f" ± {statistics.stdev(values):{std_spec or spec}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{spec}}{deviation}{unit}"


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """``median``, ``quartiles`` (the first and the third) and ``n``; a single value is its own quartiles."""
    first, median, third = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median, "quartiles": [first, third], "n": len(values)}


def format_quartiles(found: Mapping[str, Any], spec: str = ".2f") -> str:
    """What :func:`quartiles` returned, as ``median (first to third quartile)``."""
    first, third = found["quartiles"]
    return f"{found['median']:{spec}} ({first:{spec}} to {third:{spec}})"
