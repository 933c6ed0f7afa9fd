"""The tasks, a package each: ``task.py`` trains and scores, ``data.py`` reads, ``predict.py`` uses a run.

Each package has two functions: ``build(recipe, data, run) -> (model, task)`` and ``predict(run, recipe, inputs)``.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from torch import nn

from ..config import Recipe
from ..engine.task import Task
from ..run_folder import read_run_recipe
from .prediction import PredictInputs, Prediction

__all__ = ["build_task", "check_recipe", "predict"]


def build_task(recipe: Recipe, data: str | None = None, run: Path | None = None) -> tuple[nn.Module, Task]:
    """Build a recipe's model and open its data, or other ``data``.

    Args:
        run: the folder of a run that is to be used and not trained: its own assets, such as its tokenizer, take
            precedence over those of the data, of which dense tasks then open the scored split alone.

    Raises:
        UserError: a model or data that are not there, or that do not fit each other.
    """
    return importlib.import_module(f"stepsnet.tasks.{recipe.task}.task").build(recipe, data, run)


def check_recipe(recipe: Recipe, model: nn.Module) -> None:
    """Find what does not fit without opening the data, before the first of several runs starts.

    Args:
        model: the recipe's, which may be on the meta device.

    Raises:
        UserError: the model does not take what the recipe feeds it with.
    """
    task = importlib.import_module(f"stepsnet.tasks.{recipe.task}.task")
    if hasattr(task, "check"):
        task.check(recipe, model)


def predict(run: Path, inputs: PredictInputs) -> list[Prediction]:
    """What a run says of images or a text.

    Raises:
        UserError: the folder is not a run's, or a run of a task that does not take these inputs.
    """
    recipe = read_run_recipe(run)
    return importlib.import_module(f"stepsnet.tasks.{recipe.task}.predict").predict(run, recipe, inputs)
