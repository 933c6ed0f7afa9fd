"""What a run is built from: its recipe with nothing left open, its model and its task, and what is told before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import Recipe
from ..engine.task import Task
from ..models.grow.spec import start_grown, with_sources
from ..tasks import build_opened, open_data, resolve
from .advice import check_settings, on_settings

__all__ = ["Prepared", "build_and_start", "open_and_resolve", "prepare_run"]


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
    recipe, opened, lines = open_and_resolve(recipe, goes_on=goes_on)
    torch.manual_seed(recipe.seed)
    model, task, of_weights = build_and_start(recipe, opened, has_checkpoints=has_checkpoints)
    lines += of_weights if goes_on else [*of_weights, *task.remarks(), *on_settings(recipe)]
    return Prepared(recipe, model, task, lines)


def open_and_resolve(
    recipe: Recipe, open_data: Callable[[Recipe], Any] = open_data, *, goes_on: bool = False
) -> tuple[Recipe, Any, list[str]]:
    """The recipe with nothing left open, its opened data, and what is to be told of what they have decided."""
    recipe = with_sources(recipe)
    opened, lines = open_data(recipe), list[str]()
    if not goes_on:
        recipe, lines = resolve(recipe, opened)
    check_settings(recipe)
    return recipe, opened, lines


def build_and_start(
    recipe: Recipe, opened: Any, *, has_checkpoints: bool = False, on_meta: bool = False
) -> tuple[nn.Module, Task, list[str]]:
    """Model and task, and what is to be told of the weights that the model starts from.

    Args:
        on_meta: build the model on the meta device, for a check: it is found out whether the weights fit.
    """
    with torch.device("meta") if on_meta else nullcontext():
        model, task = build_opened(recipe, opened)
    if has_checkpoints:  # which the training loop verifies and restores
        return model, task, []
    return model, task, [*start_grown(model, recipe), *task.load_pretrained(model)]
