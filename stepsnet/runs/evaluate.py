"""The metrics of a run's weights, or of a file of weights of any timm or StepsNet model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..device import autocast, pick_device, pick_device_of_run
from ..engine.task import BatchShard, Task
from ..errors import UserError
from ..models.optimize import optimize
from ..models.trained import trained_model
from ..models.transfer import read_pretrained
from ..output.terminal import say
from ..run_folder.checkpoint import load_into
from ..run_folder.folder import read_run_recipe
from ..settings.config import Recipe
from ..settings.overrides import override
from ..tasks import build_task
from ..tasks.class_names import check_classes
from ..tasks.classification.any_model import build_by_name
from ..tasks.remarks import on_order
from ..tasks.splits import divided_for

__all__ = ["evaluate_checkpoint", "evaluate_run", "scored_run"]

# how mistakes in the data are handled: data other than the run's may need other values
_ON_MISTAKES = ("max_invalid", "max_undecodable", "without_objects")


def evaluate_run(folder: Path, data: str | None = None, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Return the metrics of a run's weights on its validation split, or on that of other data.

    Args:
        overrides: changes to fields of the recipe that begin with ``eval_``, such as ``eval_flip=true``, or that say
            how mistakes in the data are handled: ``max_invalid``, ``max_undecodable`` and ``without_objects``.

    Raises:
        UserError: there is no run, its weights cannot be read, or the data do not fit.
    """
    recipe = read_run_recipe(folder)
    for assignment in overrides:
        if not assignment.startswith("eval_") and assignment.partition("=")[0] not in _ON_MISTAKES:
            expected = f"a key that begins with eval_, or {', '.join(_ON_MISTAKES[:-1])} or {_ON_MISTAKES[-1]}"
            raise UserError(f"eval: got {assignment!r}, expected {expected}")
    recipe = override(recipe, overrides)
    model, score = scored_run(folder, recipe, data)
    return score(model)


def scored_run(
    folder: Path, recipe: Recipe, data: str | None
) -> tuple[nn.Module, Callable[[nn.Module], dict[str, float]]]:
    """Return a run's trained model, and a function that scores it, whole or changed, as it was scored in training.

    Raises UserError as :func:`evaluate_run` does.
    """
    for line in divided_for(recipe, data)[1]:
        say(f"stepsnet: {line}", error=True)
    model, task = build_task(recipe, data, folder)
    device = pick_device_of_run(recipe.device)
    model = trained_model(folder, recipe, model).to(device)

    def score(model: nn.Module) -> dict[str, float]:
        with autocast(recipe.amp_dtype, device):
            return _scores(task, model, device)

    return model, score


def evaluate_checkpoint(path: Path, model_name: str, data: str, args: dict[str, Any] | None = None) -> dict[str, float]:
    """Return the metrics of a checkpoint file of any timm or StepsNet model on a data set's validation split.

    Args:
        path: safetensors or torch file with a state dict, as timm reads them.
        args: arguments of the model; without ``num_classes`` it has as many classes as the data.

    Raises:
        UserError: the file cannot be read or is of another model, or the classes are not those that are named beside
            the file, as in the folder of a run.
    """
    model, task = build_by_name(model_name, args or {}, data)
    check_classes(path.parent, task.data.classes)
    device = pick_device("auto")
    load_into(model, read_pretrained(path, "checkpoint"))
    for line in on_order(path, "checkpoint", task.data.classes) if task.data.in_folders else []:
        say(f"stepsnet: {line}", error=True)
    return _scores(task, model.to(device).eval(), device)


def _scores(task: Task, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Return the task's metrics; what was left out is reported on stderr, since a number must not hide it."""
    scores = task.evaluate(optimize(model, compile=False), BatchShard(), device)
    for notice in task.notices():
        say(f"stepsnet: {notice}", error=True)
    return scores
