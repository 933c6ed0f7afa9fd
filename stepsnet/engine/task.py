"""What the training loop asks of a task; the tasks themselves are in ``stepsnet/tasks``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import UserError

__all__ = ["Share", "Task"]


@dataclass(frozen=True)
class Share:
    """One rank's part of every batch. The whole batch and its order do not depend on the number of ranks."""

    rank: int = 0
    world_size: int = 1
    accumulation_steps: int = 1

    def micro_batches(self, update: int, batch_size: int) -> list[range]:
        """The positions in the epoch's order that this rank visits in an update, one range a forward pass."""
        size = self.micro_batch_size(batch_size)
        firsts = [
            update * batch_size + (part * self.world_size + self.rank) * size for part in range(self.accumulation_steps)
        ]
        return [range(first, first + size) for first in firsts]

    def micro_batch_size(self, batch_size: int) -> int:
        """Raises UserError where the batch cannot be shared evenly."""
        parts = self.world_size * self.accumulation_steps
        if batch_size % parts:
            raise UserError(
                f"batch_size: got {batch_size}, expected a multiple of {parts} "
                f"({self.world_size} ranks × {self.accumulation_steps} accumulation_steps)"
            )
        return batch_size // parts


class Task(Protocol):
    """The data, the loss and the metrics of one kind of work."""

    steps_per_epoch: int
    batch_size: int
    monitor: str  # the metric by which one checkpoint is better than another
    lower_is_better: bool
    unit: str  # what is counted for the speed, such as images
    units_per_sample: int

    def batches(self, epoch: int, start: int, share: Share, device: torch.device) -> Iterator[Any]:
        """A rank's micro-batches of an epoch from update ``start`` on, ``accumulation_steps`` for each.

        They are a function of (seed, epoch), whatever was drawn before and whoever loads them.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to be minimised, and other means over the batch for the log."""
        ...

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        """Metrics on the validation split, of all ranks together.

        One whose name begins with ``train_`` is of training samples, as evaluation sees them.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What ``summary.json`` says of the data."""
        ...

    def notices(self) -> list[str]:
        """What there is to tell since the last call, such as samples that were passed over."""
        ...
