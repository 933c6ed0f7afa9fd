"""The record of what a residual stream carries after each block; no torch, so that reports begin at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["BlockStatistics", "as_line", "statistics_of", "summarize"]


@dataclass
class BlockStatistics:
    """After one block; z is the whole stream, y the channels that the block reads and writes."""

    width: int
    gamma: float  # σ(z_0) / σ(z_l): σ over the channels of each token, averaged
    gamma_read: float  # the same over the channels of y
    branch: float  # ‖y_l - y_{l-1}‖ / ‖y_{l-1}‖
    correlation: float  # of z_l with z_0 over the channels of each token, averaged
    gradient: float = math.nan  # ‖∂loss/∂y_l‖


_NAMES = [field.name for field in fields(BlockStatistics)]


def summarize(signals: Sequence[BlockStatistics]) -> dict[str, float]:
    """What a stream carries, in five numbers."""
    gammas = [signal.gamma for signal in signals]
    return {
        "mean_gamma": sum(gammas) / len(gammas),
        "least_gamma": min(gammas),
        "last_gamma": gammas[-1],
        "correlation_with_input": signals[-1].correlation,
        "gradient_first_over_last": signals[0].gradient / signals[-1].gradient if signals[-1].gradient else math.nan,
    }


def as_line(signals: Sequence[BlockStatistics]) -> dict[str, Any]:
    """As a line for ``metrics.jsonl``, to five digits; what is not a number is None."""
    per_block = {name: [_plain(getattr(signal, name)) for signal in signals] for name in _NAMES}
    totals = {name: _plain(value) for name, value in summarize(signals).items()}
    return {"kind": "measure_stream", **totals, "per_block": per_block}


def statistics_of(line: Mapping[str, Any]) -> list[BlockStatistics]:
    """What :func:`as_line` made."""
    columns = ([math.nan if value is None else value for value in line["per_block"][name]] for name in _NAMES)
    return [BlockStatistics(*row) for row in zip(*columns)]


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
