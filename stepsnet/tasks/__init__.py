"""The tasks, one package each: ``data.py`` reads, ``task.py`` trains and evaluates, ``predict.py`` uses a run.

Each package has two functions: ``task.build(recipe, data, run) -> (model, task)`` and
``predict.predict(run, recipe, inputs) -> predictions``.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from torch import nn

from ..config import Recipe
from ..consent import check_asked_for
from ..engine.task import Task
from ..run_folder import read_run_recipe
from .prediction import PredictInputs, Prediction

__all__ = ["build_task", "check_recipe", "predict"]


def build_task(recipe: Recipe, data: str | None = None, run: Path | None = None) -> tuple[nn.Module, Task]:
    """Build a recipe's model and open its data.

    Args:
        data: used in place of the recipe's, such as ``folder:PATH``.
        run: the folder of a run that is evaluated and not trained. Its own assets, such as its tokenizer, are used
            in place of those of the data; detection and segmentation open the evaluated split only.

    Raises:
        UserError: the model or the data do not exist, or do not fit each other.
    """
    if run is not None and data is None:
        check_asked_for(recipe, run / "config.yaml", only=["data"])
    return importlib.import_module(f"stepsnet.tasks.{recipe.task}.task").build(recipe, data, run)


def check_recipe(recipe: Recipe, model: nn.Module) -> None:
    """Check a recipe without opening its data, such as before the first of several runs.

    Args:
        model: the recipe's model, which may be on the meta device.

    Raises:
        UserError: the model does not accept the recipe's inputs.
    """
    task = importlib.import_module(f"stepsnet.tasks.{recipe.task}.task")
    if hasattr(task, "check"):
        task.check(recipe, model)


def predict(run: Path, inputs: PredictInputs) -> list[Prediction]:
    """Apply a run to images or to a prompt.

    Raises:
        UserError: the folder is not a run's, or its task does not take these inputs.
    """
    recipe = read_run_recipe(run)
    return importlib.import_module(f"stepsnet.tasks.{recipe.task}.predict").predict(run, recipe, inputs)
