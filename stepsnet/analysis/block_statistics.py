"""The record of what a residual stream carries after each block, and its line in ``metrics.jsonl``.

Imports no torch, so that ``stepsnet report`` starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["At", "BlockStatistics", "StreamMeasurement", "as_line", "read_line", "statistics_of", "summarize"]

# epoch_end: on the task's example batch, from the validation split; update: on the batch of a training update
At = Literal["epoch_end", "update"]
_SPLIT = {"epoch_end": "val", "update": "train"}


@dataclass
class BlockStatistics:
    """Statistics after block l. z is the whole residual stream (C channels), y the first ``width`` channels of it,
    which the block reads and writes.

    The paper defines γ_l = σ_0/σ_l in Sec. 3.1. Fig. 2 seems to draw it for the whole stream. Eq. (2) is about what a
    block's norm sees, which in a StepsNet are only the channels of y: that is ``gamma_read``, at the width of the block
    that wrote y. After the last block of a step, the next norm also sees the channels that join. The two are equal if a
    block reads all channels. For a block that did not run, as with LayerDrop, everything but the width is NaN.
    """

    width: int
    gamma: float  # of the whole stream: σ(z_0) / σ(z_l), where σ is over the channels of each token, averaged
    gamma_read: float  # of the part that is read: the same over the channels of y
    branch: float  # ‖y_l - y_{l-1}‖ / ‖y_{l-1}‖
    correlation: float  # of z_l with z_0 over the channels of each token, averaged
    gradient: float = math.nan  # ‖∂loss/∂y_l‖; NaN if no gradient was computed


_NAMES = [field.name for field in fields(BlockStatistics)]


@dataclass(frozen=True)
class StreamMeasurement:
    """The statistics of all blocks, in the order of execution, and when they were taken."""

    at: At
    epoch: int  # 0 is before training
    step: int  # updates so far
    blocks: list[BlockStatistics]

    @property
    def widths(self) -> list[int]:
        return [block.width for block in self.blocks]

    def values(self, name: str) -> list[float]:
        """One of :class:`BlockStatistics`' fields for each block."""
        return [getattr(block, name) for block in self.blocks]

    @property
    def reads_a_part(self) -> bool:
        """Whether ``gamma_read`` was measured and some block reads less than the whole stream."""
        return any(not math.isnan(b.gamma_read) and b.gamma_read != b.gamma for b in self.blocks)


def summarize(blocks: Sequence[BlockStatistics]) -> dict[str, float]:
    """Mean, minimum and last value over the blocks of both γ; the last correlation; the ratio of the gradients.

    Only blocks that have run count. The gradients are norms over the channels that each block reads; in a StepsNet, the
    first block reads fewer than the last.
    """
    blocks = [block for block in blocks if not math.isnan(block.gamma)] or blocks
    totals: dict[str, float] = {}
    for name in ("gamma", "gamma_read"):
        values = [getattr(block, name) for block in blocks]
        totals |= {f"mean_{name}": sum(values) / len(values), f"min_{name}": min(values), f"last_{name}": values[-1]}
    first, last = blocks[0].gradient, blocks[-1].gradient
    return {
        **totals,
        "correlation_with_input": blocks[-1].correlation,
        "gradient_first_over_last": first / last if last else math.nan,
    }


def as_line(blocks: Sequence[BlockStatistics], at: At) -> dict[str, Any]:
    """A line of kind "stream" for ``metrics.jsonl``, to five digits; numbers that are not finite are None.

    The names of the totals of :func:`summarize` begin with the split of the batch: ``val_mean_gamma`` at an epoch's
    end, ``train_mean_gamma`` in an update. The caller adds epoch and step.
    """
    per_block = {name: [_plain(getattr(block, name)) for block in blocks] for name in _NAMES}
    totals = {f"{_SPLIT[at]}_{name}": _plain(value) for name, value in summarize(blocks).items()}
    return {"kind": "stream", "at": at, **totals, "per_block": per_block}


def statistics_of(line: Mapping[str, Any]) -> list[BlockStatistics]:
    """The statistics of each block in a line that :func:`as_line` made."""
    columns = ([math.nan if value is None else value for value in line["per_block"][name]] for name in _NAMES)
    return [BlockStatistics(*row) for row in zip(*columns)]


def read_line(line: Mapping[str, Any]) -> StreamMeasurement | None:
    """A line of ``metrics.jsonl`` as a measurement; None for a line of another kind."""
    if line["kind"] != "stream":
        return None
    return StreamMeasurement(line["at"], line["epoch"], line["step"], statistics_of(line))


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
