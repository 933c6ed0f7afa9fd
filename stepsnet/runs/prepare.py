"""What a run is built from: its recipe with nothing left open, its model and its task, and what is told before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..config import Recipe
from ..engine.task import Task
from ..models.grow.spec import start_grown, with_sources
from ..tasks import build_opened, open_data, resolve
from .advice import check_settings, on_settings

__all__ = ["Prepared", "prepare_run"]


@dataclass(frozen=True)
class Prepared:
    recipe: Recipe  # with what its data decide
    model: nn.Module  # with the weights that it starts from
    task: Task
    lines: list[str]  # to be told before the training


def prepare_run(recipe: Recipe, *, goes_on: bool = False, has_checkpoints: bool = False) -> Prepared:
    """Open the data of a recipe, resolve what it leaves open, and build model and task.

    The model starts from the recipe's seed.

    Args:
        goes_on: with a run that has begun, whose decisions the recipe has: nothing is decided or told again.
        has_checkpoints: of the run, so that the weights to start from are not read.

    Raises:
        UserError: the model, the data or the weights do not exist, or do not fit each other.
    """
    recipe = with_sources(recipe)
    opened, lines = open_data(recipe), list[str]()
    if not goes_on:
        recipe, lines = resolve(recipe, opened)
    check_settings(recipe)
    torch.manual_seed(recipe.seed)
    model, task = build_opened(recipe, opened)
    if not has_checkpoints:  # which the training loop verifies and restores
        lines += [*start_grown(model, recipe), *task.load_pretrained(model)]
    if not goes_on:
        lines += [*task.remarks(), *on_settings(recipe)]
    return Prepared(recipe, model, task, lines)
