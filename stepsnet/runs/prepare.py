"""What a run is built from: its recipe with nothing left open, its model and task, and the lines to show first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.optim import rate_at
from ..engine.task import Task, data_counts
from ..models.grow.spec import start_grown, with_sources
from ..run_folder.folder import updates_done
from ..run_folder.resuming import check_data, check_length
from ..settings.config import Recipe
from ..tasks import build_opened, open_data, resolve
from .advice import check_settings, on_settings

__all__ = ["Prepared", "build_and_start", "check_folder", "open_and_resolve", "prepare_run"]


@dataclass(frozen=True)
class Prepared:
    recipe: Recipe  # completed with what its data decide
    model: nn.Module  # with the weights that it starts from
    task: Task
    lines: list[str]  # for the user, before the training
    goes_on: bool  # it continues a run; a start that failed does not count as one


def prepare_run(recipe: Recipe, *, goes_on: bool = False, has_checkpoints: bool = False) -> Prepared:
    """Open the data of a recipe, resolve what it leaves open, and build model and task.

    The model starts from the recipe's seed.

    Args:
        goes_on: continue a run that has begun. The recipe has what was decided then: nothing is decided or told again.
        has_checkpoints: the run has checkpoints or has ended, so that the weights to start from are not read.

    Raises:
        UserError: the model, the data or the weights do not exist, or do not fit each other.
    """
    recipe, opened, lines = open_and_resolve(recipe, goes_on=goes_on)
    torch.manual_seed(recipe.seed)
    model, task, of_weights = build_and_start(recipe, opened, has_checkpoints=has_checkpoints)
    lines += of_weights if goes_on else [*of_weights, *task.remarks(), *on_settings(recipe)]
    return Prepared(recipe, model, task, lines, goes_on)


def check_folder(folder: Path, prepared: Prepared) -> list[str]:
    """Return what to tell the user if a run continues in a folder with another number of epochs, else nothing.

    Raises:
        UserError: the run has already been trained for longer, or with other data.
    """
    recipe, task = prepared.recipe, prepared.task
    done, steps = updates_done(folder), task.steps_per_epoch
    check_length(folder, recipe.epochs, steps)
    check_data(folder, data_counts(task), recipe)
    if prepared.goes_on:
        task.check_assets(folder)
    if not recipe.earlier_epochs or recipe.earlier_epochs[-1][0] != done:
        return []
    before = recipe.earlier_epochs[-1][1]
    old, new = (
        rate_at(replace(recipe, epochs=epochs, earlier_epochs=()), done, steps) for epochs in (before, recipe.epochs)
    )
    return [
        f"{recipe.epochs} epochs instead of {before}: after update {done} lr is {new:.3g} instead of {old:.3g}, and "
        f"the schedule ends at update {recipe.epochs * steps} instead of {before * steps}"
    ]


def open_and_resolve(
    recipe: Recipe, open_data: Callable[[Recipe], Any] = open_data, *, goes_on: bool = False
) -> tuple[Recipe, Any, list[str]]:
    """Return the recipe with nothing left open, its opened data, and lines about what the data have decided."""
    recipe = with_sources(recipe)
    opened, lines = open_data(recipe), list[str]()
    if not goes_on:
        recipe, lines = resolve(recipe, opened)
    check_settings(recipe)
    return recipe, opened, lines


def build_and_start(
    recipe: Recipe, opened: Any, *, has_checkpoints: bool = False, on_meta: bool = False
) -> tuple[nn.Module, Task, list[str]]:
    """Return model and task, and lines about the weights that the model starts from.

    Args:
        has_checkpoints: as in :func:`prepare_run`.
        on_meta: build the model on the meta device, only to check whether the weights fit.
    """
    with torch.device("meta") if on_meta else nullcontext():
        model, task = build_opened(recipe, opened)
    if has_checkpoints:  # the training loop verifies and restores them
        return model, task, []
    return model, task, [*start_grown(model, recipe), *task.load_pretrained(model)]
