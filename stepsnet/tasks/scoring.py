"""What tasks need to divide an evaluation among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchmetrics import MeanMetric

from ..engine.task import BatchShard

__all__ = ["mean_loss", "of_all_ranks", "shared_by"]


def shared_by(shard: BatchShard) -> dict[str, Any]:
    """The argument that makes a torchmetrics metric cover all ranks, or only this one if it evaluates alone."""
    return {"sync_on_compute": shard.world_size > 1}


def mean_loss(shard: BatchShard) -> MeanMetric:
    """A weighted mean that a single NaN makes NaN: by default, torchmetrics leaves NaN out."""
    return MeanMetric(nan_strategy=math.nan, **shared_by(shard))  # "disable" would leave out the weights


def of_all_ranks(names: Iterable[str], shard: BatchShard) -> dict[str, None]:
    """The names that any rank has, as an ordered set; every rank has to call this."""
    return dict.fromkeys(name for of_rank in shard.gather(list(names)) for name in of_rank)
