"""What the training loop asks of a task; the tasks themselves are in ``stepsnet/tasks``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Task"]


class Task(Protocol):
    """The data, the loss and the metrics of one kind of work."""

    steps_per_epoch: int
    batch_size: int

    def batches(self, epoch: int, start: int, device: torch.device) -> Iterator[Any]:
        """The training batches of an epoch from number ``start`` on, a function of (seed, epoch)."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to be minimised, and other means over the batch for the log (``top1`` in percent)."""
        ...

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Metrics on the validation split."""
        ...
