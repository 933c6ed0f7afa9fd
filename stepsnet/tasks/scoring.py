"""What the ranks that share out an evaluation have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchmetrics import MeanMetric

from ..engine.task import BatchShard

__all__ = ["mean_loss", "of_all_ranks", "shared_by"]


def shared_by(shard: BatchShard) -> dict[str, Any]:
    """The argument by which a metric of torchmetrics is of all ranks, or of one that evaluates alone."""
    return {"sync_on_compute": shard.world_size > 1}


def mean_loss(shard: BatchShard) -> MeanMetric:
    """A weighted mean, which one value that is NaN makes NaN: by default torchmetrics leaves it out."""
    return MeanMetric(nan_strategy=math.nan, **shared_by(shard))  # "disable" would leave out the weights


def of_all_ranks(names: Iterable[str], shard: BatchShard) -> dict[str, None]:
    """An ordered set of what each rank has; every rank calls it."""
    return dict.fromkeys(name for of_rank in shard.gather(list(names)) for name in of_rank)
