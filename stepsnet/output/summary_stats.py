"""Summary statistics as numbers and as text.

Results over seeds are given as mean ± sample standard deviation, timings as median and quartiles.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "format_count",
    "format_mean_std",
    "format_number",
    "format_quartiles",
    "mean_and_std",
    "percent",
    "quartiles",
]


def format_mean_std(values: Sequence[float], spec: str = ".2f", unit: str = "", std_spec: str | None = None) -> str:
    """Mean ± sample standard deviation, such as ``71.0 ± 1.8%``; a single value has no deviation.

    Args:
        spec: the format of the mean, and of the deviation unless ``std_spec`` gives another one.
        unit: written after both, as it stands.
    """
    deviation = f" ± {statistics.stdev(values):{std_spec or spec}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{spec}}{deviation}{unit}"


def mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    """``mean``, ``std`` (the sample standard deviation, None for one value) and ``values``."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": deviation, "values": list(values)}


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """``median``, ``quartiles`` (the first and the third, within the values) and ``n``."""
    several = values if len(values) > 1 else [values[0]] * 2
    first, median, third = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": median, "quartiles": [first, third], "n": len(values)}


def format_quartiles(found: Mapping[str, Any], spec: str | None = ".2f") -> str:
    """The result of :func:`quartiles` as ``median (first to third quartile)``; without a spec, by format_number."""
    values = (found["median"], *found["quartiles"])
    median, first, third = (format_number(value) if spec is None else f"{value:{spec}}" for value in values)
    return f"{median} ({first} to {third})"


def format_count(value: float) -> str:
    """Parameters and MACs as 1.23 M."""
    size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.2f} {unit}" if unit else str(value)


def percent(share: float) -> str:
    """0.995 as 99.5%, as exactly as it is given."""
    return f"{100 * share:.10g}%"


def format_number(value: float) -> str:
    """With three significant digits, but all of those before the point, and no exponent: 0.0123, 45.6, 1,423."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.2e}")  # 9.996 has one digit before the point, and 10.0 has two
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"
