"""When a run has ended, what its report shows of the trained model, on validation data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..device import autocast
from ..engine.randomness import keep_random_states
from ..engine.task import Task
from ..errors import in_a_line
from ..models.trained import untrained_model
from ..run_folder.checkpoint import load_into
from ..run_folder.inspection import write_inspection
from ..settings.config import Recipe

__all__ = ["inspect_run"]


def inspect_run(
    recipe: Recipe,
    folder: Path,
    task: Task,
    weights: Mapping[str, Tensor],
    device: torch.device,
    note: Callable[[str], None],
) -> None:
    """Write ``inspection.json`` of a run that has ended, on one rank; random states are preserved.

    Whatever goes wrong is only reported in a line: the run already has its weights and its summary.
    """
    try:
        with keep_random_states(device), torch.no_grad():
            model = untrained_model(recipe)
            load_into(model, weights)
            with autocast(recipe.amp_dtype, device):
                sections = task.inspect(model.to(device).eval(), device)
        write_inspection(folder, sections)
    except Exception as error:  # from a task, a library, exhausted memory or the disk
        note(f"the report has no examples of what the model does: {in_a_line(error, 200, with_type=True)}")
