"""The tasks, one package each: ``data.py`` reads, ``task.py`` trains and evaluates, ``predict.py`` uses a run.

A package has the following functions, of which only the first is required; :func:`register_task` takes the same
functions for a task that is not in this folder:

- ``task.build(recipe, data, run) -> (model, task)``
- ``predict.predict(run, recipe, inputs) -> predictions``
- ``publish.publish(run, recipe, folder) -> publication``
- ``deployment.deployment(run, recipe, model) -> deployment``, if its models can be exported
- ``task.open_data(recipe, data, run) -> opened``, to open data once for several models; ``build`` takes the result as a
  fourth argument
- ``task.resolve(recipe, opened) -> (recipe, lines)``, if the data decide what a recipe leaves open
- ``task.macs(recipe)``, if the compute of a forward pass depends on more than the model's own input size
- ``task.normalization(recipe)``, if other runs may start from its runs' weights: that of the images these have seen
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..analysis.complexity import count_complexity
from ..engine.task import Task
from ..errors import UserError
from ..metrics import METRICS, Metric
from ..models.build import build_model, input_size_of
from ..run_folder.folder import CONFIG, asset, read_run_recipe
from ..settings.config import RECIPE_TYPES, Recipe
from ..settings.consent import require_asked_for
from .deployment import Deployment
from .prediction import PredictInputs, Prediction
from .publication import Publication
from .splits import divided_for

__all__ = [
    "build_opened",
    "build_task",
    "describe_deployment",
    "macs_of",
    "normalization_of_run",
    "open_data",
    "predict",
    "publish",
    "register_task",
    "resolve",
]


def build_task(recipe: Recipe, data: str | None = None, run: Path | None = None) -> tuple[nn.Module, Task]:
    """Build a recipe's model and open its data, which decide what the recipe leaves open.

    Args:
        data: used instead of the recipe's, such as ``folder:PATH``.
        run: the folder of a run that is evaluated rather than trained. Its own assets, such as its tokenizer, are used
            instead of those of the data, and its model is as its recipe says; detection and segmentation open only the
            evaluated split. Data other than the recipe's are divided as they come (splits.py).

    Raises:
        UserError: the model or the data do not exist, or do not fit each other.
    """
    if run is not None and data is None:
        require_asked_for(recipe, asset(run, CONFIG), only=["data"])
    if run is not None:
        recipe, _ = divided_for(recipe, data)
    opened = open_data(recipe, data, run)
    if run is None:
        recipe, _ = resolve(recipe, opened)
    return build_opened(recipe, opened, data, run)


def open_data(recipe: Recipe, data: str | None = None, run: Path | None = None) -> Any:
    """Open a recipe's data for :func:`resolve` and :func:`build_opened`; None if ``build`` alone opens them.

    Raises:
        UserError: the data do not exist, or there is a mistake in them.
    """
    function = _function(recipe, "open_data")
    return function(recipe, data or recipe.data, run) if function else None


def resolve(recipe: Recipe, opened: Any) -> tuple[Recipe, list[str]]:
    """The recipe with what its data decide, and lines for the user, one for each decision or apparent mistake.

    Raises:
        UserError: what the recipe leaves open cannot be decided, or the model does not accept it.
    """
    function = _function(recipe, "resolve")
    return function(recipe, opened) if function else (recipe, [])


def build_opened(
    recipe: Recipe, opened: Any, data: str | None = None, run: Path | None = None
) -> tuple[nn.Module, Task]:
    """Like :func:`build_task`, for a recipe that leaves nothing open, with what :func:`open_data` returned.

    On the meta device (``with torch.device("meta")``) this only checks the recipe: the task is then not for training.
    """
    more = () if opened is None else (opened,)
    return _function(recipe, "build")(recipe, data, run, *more)


def macs_of(recipe: Recipe) -> int:
    """Multiply-accumulates of a forward pass; no data are opened."""
    if macs := _function(recipe, "macs") or _inherited(recipe, "macs"):
        return macs(recipe)
    with torch.device("meta"):
        model = build_model(recipe.model, pretrained=False)
    return count_complexity(model, input_size_of(recipe.model, model)).macs


def normalization_of_run(recipe: Recipe) -> Any:
    """The :class:`~.normalization.Normalization` of the images that a run was trained on; None if it has none."""
    normalization = _function(recipe, "normalization") or _inherited(recipe, "normalization")
    return normalization(recipe) if normalization else None


def predict(run: Path, inputs: PredictInputs) -> list[Prediction]:
    """Apply a run to images or to a prompt.

    Raises:
        UserError: the folder is not that of a run, or its task does not take these inputs.
    """
    recipe = read_run_recipe(run)
    inputs.check(recipe)
    if apply := _function(recipe, "predict"):
        return apply(run, recipe, inputs)
    raise UserError(f"predict: {run} is a run of {recipe.task}, whose module registers no function to predict")


def publish(run: Path, recipe: Recipe, folder: Path) -> Publication:
    """Write a run's model into an existing folder, in a format that others can load.

    Raises:
        UserError: the run has no weights, or its task has no such format.
    """
    if write := _function(recipe, "publish"):
        return write(run, recipe, folder)
    raise UserError(f"push: {run} is a run of {recipe.task}, whose module registers no function to publish")


def describe_deployment(run: Path, recipe: Recipe, model: nn.Module) -> Deployment:
    """How a run's model is used without stepsnet.

    Raises:
        UserError: the folder is incomplete, or models of its task cannot be exported.
    """
    if describe := _function(recipe, "deployment"):
        return describe(run, recipe, model)
    raise UserError(f"export: {run} is a run of {recipe.task}, whose models cannot be exported")


def register_task(
    recipe_type: type[Recipe],
    *,
    build: Callable[..., tuple[nn.Module, Task]],
    predict: Callable[[Path, Any, PredictInputs], list[Prediction]] | None = None,
    macs: Callable[[Any], int] | None = None,
    publish: Callable[[Path, Any, Path], Publication] | None = None,
    deployment: Callable[[Path, Any, nn.Module], Deployment] | None = None,
    open_data: Callable[[Any, str, Path | None], Any] | None = None,
    resolve: Callable[[Any, Any], tuple[Any, list[str]]] | None = None,
    normalization: Callable[[Any], Any] | None = None,
    metrics: Sequence[Metric] = (),
) -> None:
    """Add a task, from a user's module that a recipe names under ``import``.

    Args:
        recipe_type: a pydantic dataclass that derives from :class:`~stepsnet.settings.config.Recipe`. The default of
            its field ``task`` is the task's name; a task registered earlier under that name is replaced.
        build: like :func:`build_task`; with ``open_data``, it takes what that returns as a fourth argument.
        predict: like :func:`predict`, with the recipe as the second argument; None if there is nothing to predict.
        macs: like :func:`macs_of`.
        publish: like :func:`publish`, for `stepsnet push`; None if runs are not published.
        deployment: like :func:`describe_deployment`, for `stepsnet export`; None if models are not exported.
        open_data: like :func:`open_data`; models that are compared share what it returns, which must not be None.
        resolve: like :func:`resolve`.
        normalization: like :func:`normalization_of_run`; None uses that of the task of ours whose recipe type this one
            derives from.
        metrics: the metrics that the task's ``evaluate`` returns, besides ``loss`` and those listed in ``metrics.py``.

    Raises:
        ValueError: ``recipe_type`` is not a recipe's type or has no default ``task``, the name is one of stepsnet's own
            tasks, or the key of a metric is taken by a different one.
    """
    if not (isinstance(recipe_type, type) and issubclass(recipe_type, Recipe)):
        raise ValueError(f"register_task: got {recipe_type!r}, expected a type that derives from Recipe")
    name = recipe_type.task
    if not isinstance(name, str):
        raise ValueError(f"register_task: {recipe_type.__name__}.task has no default, expected the name of the task")
    if name in RECIPE_TYPES and name not in _registered:
        raise ValueError(f"register_task: got {name!r}, expected a name that is not one of stepsnet's own tasks")
    for metric in metrics:
        if METRICS.get(metric.key, metric) != metric:
            raise ValueError(f"register_task: the metric {metric.key!r} is already registered as {METRICS[metric.key]}")
    RECIPE_TYPES[name] = recipe_type
    METRICS.update({metric.key: metric for metric in metrics})
    _registered[name] = {
        "build": build,
        "predict": predict,
        "macs": macs,
        "publish": publish,
        "deployment": deployment,
        "open_data": open_data,
        "resolve": resolve,
        "normalization": normalization,
    }


_registered: dict[str, dict[str, Callable[..., Any] | None]] = {}  # task -> what `register_task` was given


def _function(recipe: Recipe, name: str) -> Any:
    """A function of the recipe's task; None if the task does not have it."""
    if recipe.task in _registered:
        return _registered[recipe.task][name]
    return _own_function(recipe.task, name)


def _inherited(recipe: Recipe, name: str) -> Any:
    """The function of the task of ours whose recipe type a user's derives from; None if it derives from none."""
    own = {kind: task for task, kind in RECIPE_TYPES.items() if task not in _registered}
    task = next((own[kind] for kind in type(recipe).__mro__ if kind in own), None)
    return _own_function(task, name) if task else None


def _own_function(task: str, name: str) -> Any:
    file = name if name in ("predict", "publish", "deployment") else "task"
    module = f"stepsnet.tasks.{task}.{file}"
    return getattr(importlib.import_module(module), name, None) if importlib.util.find_spec(module) else None
