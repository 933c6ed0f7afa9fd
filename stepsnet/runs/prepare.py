"""What a run is built from: its recipe with nothing left open, its model and its task, and what is told before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..config import Recipe
from ..engine.task import Task
from ..from_data import as_begun
from ..tasks import build_opened, open_data, resolve
from .advice import on_settings

__all__ = ["Prepared", "prepare_run"]


@dataclass(frozen=True)
class Prepared:
    recipe: Recipe  # with what its data decide
    model: nn.Module  # with the weights that it starts from
    task: Task
    lines: list[str]  # to be told before the training


def prepare_run(recipe: Recipe, begun: Recipe | None = None, has_checkpoints: bool = False) -> Prepared:
    """Open the data of a recipe, resolve what it leaves open, and build model and task.

    The model starts from the recipe's seed.

    Args:
        begun: the recipe of the run, if it has begun: what it decided stays.
        has_checkpoints: of the run, so that the weights to start from are not read.

    Raises:
        UserError: the model, the data or the weights do not exist, or do not fit each other.
    """
    if begun is not None:
        recipe = as_begun(recipe, begun)
    opened, lines = open_data(recipe), list[str]()
    if begun is None:
        recipe, lines = resolve(recipe, opened)
    torch.manual_seed(recipe.seed)
    model, task = build_opened(recipe, opened)
    if not has_checkpoints:  # which the training loop verifies and restores
        lines += task.load_pretrained(model)
    if begun is None:
        lines += [*task.remarks(), *on_settings(recipe)]
    return Prepared(recipe, model, task, lines)
