"""A recipe made ready: its model, its task and what is known of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..analysis.complexity import Complexity
from ..engine.task import Task
from ..recipes.recipe import Recipe

__all__ = ["Setup", "set_up"]


def _keep_nothing(folder: Path) -> None:
    """All that classification needs is in the recipe."""


@dataclass(frozen=True)
class Setup:
    """What a run needs; a task's module makes it from the task's kind of recipe."""

    model: nn.Module
    task: Task
    complexity: Callable[[nn.Module], Complexity]
    sample: Callable[[torch.device], Any]  # a batch of the validation split, for ``task.loss``
    probe: Callable[[nn.Module, torch.device], dict[str, Any]] | None = None  # a look inside, for metrics.jsonl
    keep: Callable[[Path], None] = _keep_nothing  # write what else the run's folder must hold
    start: Callable[[], None] | None = None  # give the model weights of another run; for one that has none of its own


def set_up(recipe: Recipe, data: str | None = None, run: Path | None = None) -> Setup:
    """Build a recipe's model and open its data, or other ``data``.

    Args:
        run: the folder of a run that is to be used and not trained: its own parts, such as its tokenizer, go
            before those of the data, of which dense tasks then open the scored split alone.

    Raises:
        UserError: a model or data that are not there, or that do not fit each other.
    """
    return importlib.import_module(f"stepsnet.tasks.{recipe.task}").set_up(recipe, data, run)
