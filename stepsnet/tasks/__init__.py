"""The tasks, one package each: ``data.py`` reads, ``task.py`` trains and evaluates, ``predict.py`` uses a run.

A package has these functions, of which only the first has to be there; :func:`register_task` takes the same of a task
that is not in this folder:

- ``task.build(recipe, data, run) -> (model, task)``
- ``predict.predict(run, recipe, inputs) -> predictions``
- ``publish.publish(run, recipe, folder) -> publication``
- ``deployment.deployment(run, recipe, model) -> deployment``, where models are exported
- ``task.open_data(recipe, data, run) -> opened``, so that data are opened once for several models; ``build`` takes what
  it returns as a fourth argument
- ``task.resolve(recipe, opened) -> (recipe, lines)``, where data decide what a recipe leaves open
- ``task.macs(recipe)``, where the compute of a forward pass goes by more than the model's own input size
- ``task.normalization(recipe)``, where others start from its runs' weights: what those have seen
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
from ..config import RECIPE_TYPES, Recipe
from ..consent import require_asked_for
from ..engine.task import Task
from ..errors import UserError
from ..metrics import METRICS, Metric
from ..models.build import build_model, input_size_of
from ..run_folder import CONFIG, read_run_recipe
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
        data: used in place of the recipe's, such as ``folder:PATH``.
        run: the folder of a run that is evaluated and not trained. Its own assets, such as its tokenizer, are used
            in place of those of the data, and its model is as its recipe says; detection and segmentation open the
            evaluated split only. Other data than the recipe's are divided as they come (splits.py).

    Raises:
        UserError: the model or the data do not exist, or do not fit each other.
    """
    if run is not None and data is None:
        require_asked_for(recipe, run / CONFIG, only=["data"])
    if run is not None:
        recipe, _ = divided_for(recipe, data)
    opened = open_data(recipe, data, run)
    if run is None:
        recipe, _ = resolve(recipe, opened)
    return build_opened(recipe, opened, data, run)


def open_data(recipe: Recipe, data: str | None = None, run: Path | None = None) -> Any:
    """The data of a recipe, for :func:`resolve` and :func:`build_opened`; None where ``build`` alone opens them.

    Raises:
        UserError: the data do not exist, or have a mistake.
    """
    function = _function(recipe, "open_data")
    return function(recipe, data or recipe.data, run) if function else None


def resolve(recipe: Recipe, opened: Any) -> tuple[Recipe, list[str]]:
    """The recipe with what its data decide, and lines for the user: a decision each, or what seems to be a mistake.

    Raises:
        UserError: what the recipe leaves open cannot be decided, or the model does not accept it.
    """
    function = _function(recipe, "resolve")
    return function(recipe, opened) if function else (recipe, [])


def build_opened(
    recipe: Recipe, opened: Any, data: str | None = None, run: Path | None = None
) -> tuple[nn.Module, Task]:
    """As :func:`build_task`, of a recipe that leaves nothing open, with what :func:`open_data` has returned.

    On the meta device (``with torch.device("meta")``) the recipe is checked: the task is not for training then.
    """
    more = () if opened is None else (opened,)
    return _function(recipe, "build")(recipe, data, run, *more)


def macs_of(recipe: Recipe) -> int:
    """Multiply-accumulates of a forward pass, without data."""
    if macs := _function(recipe, "macs") or _inherited(recipe, "macs"):
        return macs(recipe)
    with torch.device("meta"):
        model = build_model(recipe.model, pretrained=False)
    return count_complexity(model, input_size_of(recipe.model, model)).macs


def normalization_of_run(recipe: Recipe) -> Any:
    """The :class:`~.normalization.Normalization` of the images that a run was trained on; None where it has none."""
    normalization = _function(recipe, "normalization") or _inherited(recipe, "normalization")
    return normalization(recipe) if normalization else None


def predict(run: Path, inputs: PredictInputs) -> list[Prediction]:
    """Apply a run to images or to a prompt.

    Raises:
        UserError: the folder is not a run's, or its task does not take these inputs.
    """
    recipe = read_run_recipe(run)
    inputs.check(recipe)
    if apply := _function(recipe, "predict"):
        return apply(run, recipe, inputs)
    raise UserError(f"predict: {run} is a run of {recipe.task}, whose module registers no function for it")


def publish(run: Path, recipe: Recipe, folder: Path) -> Publication:
    """Write a run's model into an existing folder, in the form in which others load it.

    Raises:
        UserError: the run has no weights, or its task has no such form.
    """
    if write := _function(recipe, "publish"):
        return write(run, recipe, folder)
    raise UserError(f"push: {run} is a run of {recipe.task}, whose module registers no function for it")


def describe_deployment(run: Path, recipe: Recipe, model: nn.Module) -> Deployment:
    """How a run's model is used without stepsnet.

    Raises:
        UserError: the folder is not whole, or models of its task are not exported.
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
    """Add a task, as a module of the user's does that a recipe names under ``import``.

    Args:
        recipe_type: a pydantic dataclass that derives from :class:`~stepsnet.config.Recipe`. The default of its field
            ``task`` is the task's name; a task of that name that was registered before is replaced.
        build: as :func:`build_task`; with ``open_data`` it takes what that returns as a fourth argument.
        predict: as :func:`predict`, with the recipe as a second argument; None where there is nothing to predict.
        macs: as :func:`macs_of`.
        publish: as :func:`publish`, for `stepsnet push`; None where a run is not published.
        deployment: as :func:`describe_deployment`, for `stepsnet export`; None where models are not exported.
        open_data: as :func:`open_data`, so that models that are compared share what it returns; not None.
        resolve: as :func:`resolve`.
        normalization: as :func:`normalization_of_run`, of a recipe; None: that of our task whose recipe's type this one
            derives from.
        metrics: what the task's ``evaluate`` returns, besides ``loss`` and what ``metrics.py`` lists.

    Raises:
        ValueError: it is no type of recipe, or its name is one of stepsnet's own tasks or metrics.
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
            raise ValueError(f"register_task: the metric {metric.key!r} is there already, as {METRICS[metric.key]}")
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


_registered: dict[str, dict[str, Callable[..., Any] | None]] = {}  # by task, what `register_task` was given


def _function(recipe: Recipe, name: str) -> Any:
    """A function of the recipe's task; None where the task does not have it."""
    if recipe.task in _registered:
        return _registered[recipe.task][name]
    return _own_function(recipe.task, name)


def _inherited(recipe: Recipe, name: str) -> Any:
    """That of the task of ours from whose recipe a user's derives; None where it derives from none."""
    own = {kind: task for task, kind in RECIPE_TYPES.items() if task not in _registered}
    task = next((own[kind] for kind in type(recipe).__mro__ if kind in own), None)
    return _own_function(task, name) if task else None


def _own_function(task: str, name: str) -> Any:
    file = name if name in ("predict", "publish", "deployment") else "task"
    module = f"stepsnet.tasks.{task}.{file}"
    return getattr(importlib.import_module(module), name, None) if importlib.util.find_spec(module) else None
