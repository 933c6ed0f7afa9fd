"""What the training loop asks of a task; the tasks themselves are in ``stepsnet/tasks``."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..analysis.complexity import Complexity
from ..errors import UserError
from ..run_folder.inspection import Section

__all__ = ["BatchShard", "EvaluationBatch", "Task", "data_counts"]

T = TypeVar("T")


class EvaluationBatch(NamedTuple):
    """What one rank evaluates in one forward pass."""

    indices: range  # of the samples
    is_padding: bool  # the forward pass is needed, but its result is not counted


@dataclass(frozen=True)
class BatchShard:
    """The part of every batch that one rank processes. The batch and its order do not depend on the number of ranks."""

    rank: int = 0
    world_size: int = 1
    accumulation_steps: int = 1

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on every rank; all of them call it. Without a process group, a rank is alone."""
        if self.world_size == 1 or not dist.is_initialized():
            return [value]
        found = [value] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def micro_batches(self, update: int, batch_size: int) -> list[range]:
        """The positions in the epoch's order that this rank processes in an update, one range per forward pass."""
        size = self.micro_batch_size(batch_size)
        firsts = [
            update * batch_size + (part * self.world_size + self.rank) * size for part in range(self.accumulation_steps)
        ]
        return [range(first, first + size) for first in firsts]

    def micro_batch_size(self, batch_size: int) -> int:
        """Samples per forward pass. Raises UserError if the batch cannot be divided evenly."""
        parts = self.world_size * self.accumulation_steps
        if batch_size % parts:
            raise UserError(
                f"batch_size: got {batch_size}, expected a multiple of {parts} "
                f"({self.world_size} ranks × {self.accumulation_steps} accumulation_steps)"
            )
        return batch_size // parts

    def evaluation_batches(self, samples: int, batch_size: int) -> list[EvaluationBatch]:
        """This rank's batches of samples 0 to ``samples`` - 1; together, the ranks visit each sample once.

        Every rank gets the same number of batches, because FSDP gathers the weights in each forward pass: a rank that
        has none left repeats sample 0 as padding.

        Args:
            batch_size: the most samples per forward pass; fewer if there are not enough for all ranks.
        """
        size = max(1, min(batch_size, -(-samples // self.world_size)))
        rounds = -(-samples // (size * self.world_size))
        firsts = [(turn * self.world_size + self.rank) * size for turn in range(rounds)]
        return [
            EvaluationBatch(range(first, min(first + size, samples)), False)
            if first < samples
            else EvaluationBatch(range(1), True)
            for first in firsts
        ]


class Task(Protocol):
    """The data, the loss and the metrics of one kind of work, for one model."""

    steps_per_epoch: int
    batch_size: int
    monitor: str  # the metric by which one checkpoint is better than another (metrics.py)
    unit: str  # what is counted for the speed, such as images
    units_per_sample: int

    # called by the training loop

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Any]:
        """A rank's micro-batches of an epoch from update ``start`` on, ``accumulation_steps`` for each update.

        They are a function of (seed, epoch), whatever was drawn before and whichever process loads them. This is a
        generator, so that closing it ends the loading processes.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to be minimised, and other means over the batch for the log."""
        ...

    def evaluate(self, model: nn.Module, shard: BatchShard, device: torch.device) -> dict[str, float]:
        """Metrics on the validation split, over all ranks together.

        A metric whose name begins with ``train_`` is measured on training samples, as evaluation sees them.
        """
        ...

    def example_batch(self, device: torch.device) -> Any:
        """A small batch of the validation split for ``loss``, without augmentation."""
        ...

    def sizes(self) -> dict[str, int]:
        """How much data there is to ``"train"`` on and to be ``"evaluated"``, such as images; by default nothing.

        A run does not resume with other numbers: what an epoch is, and the order in it, depend on them.
        """
        return {}

    def facts(self) -> dict[str, Any]:
        """What ``summary.json`` says about the data; by default nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the task has found so far and :meth:`facts` reports, for a checkpoint; by default nothing.

        Only what JSON can hold: numbers, text, lists, and mappings with text as keys.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier process has found; nothing if an earlier version wrote the checkpoint."""
        return None

    def notices(self) -> list[str]:
        """Messages since the last call, about skipped samples for example; by default none."""
        return []

    # called by the commands

    def load_pretrained(self, model: nn.Module) -> list[str]:
        """Load the weights that the recipe names, such as a backbone's, into a new model; by default none.

        If the model is on the meta device, the weights are only checked.

        Returns:
            Lines for the user about these weights.
        """
        return []

    def remarks(self) -> list[str]:
        """What a user should know about the data before training, such as a class without samples."""
        return []

    def complexity(self, model: nn.Module) -> Complexity:
        """Blocks, layers, parameters and multiply-accumulates at this task's input size."""
        ...

    def inspect(self, model: nn.Module, device: torch.device) -> list[Section]:
        """What the report of a run shows of its trained model, on the evaluated split; by default nothing.

        One rank calls it once, when the run has ended. The model is in evaluation mode. The result is small, whatever
        the size of the split, and takes no longer than an evaluation.
        """
        return []

    def check_assets(self, folder: Path) -> None:
        """Check that a folder's assets belong to these data, before anything is written for a run that resumes.

        Raises:
            UserError: the folder has other assets, such as other class names.
        """
        return None

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Write what a run's folder needs besides weights and recipe, such as a tokenizer; by default nothing."""
        return None


def data_counts(task: Task) -> dict[str, int]:
    """What a checkpoint records about a task's data; :meth:`.Checkpoint.check_data` compares it."""
    return {**task.sizes(), "updates an epoch": task.steps_per_epoch}
