"""A grown network in a recipe: ``{"name": "grow", "args": {"model": RUN, "steps": 2}}``.

The recipe that a run writes holds the model of RUN in full, in place of its folder, so that the run can be read,
resumed and published without RUN. The weights are read from RUN when training starts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from torch import nn

from ...errors import UserError
from ...plan import steps_as_text, steps_of
from ...run_folder.checkpoint import check_fit, load_into, retied
from ...run_folder.folder import CONFIG, has_ended, read_run_recipe
from ...settings.config import ModelSpec, Recipe
from ...settings.from_data import SHARED_ARGS
from ..blocks import widths_of
from ..build import build_model
from ..transfer import read_pretrained, start_from
from .convert import grow

__all__ = ["NAME", "create", "start_grown", "with_sources"]

NAME = "grow"
_OPTIONS = frozenset(inspect.signature(grow).parameters) - {"model"}
_KEY = "model.args"

R = TypeVar("R", bound=Recipe)


def create(**kwargs: Any) -> nn.Module:
    """The grown network with random weights in place of the trained ones, for a :class:`.ModelSpec`.

    Args:
        model: the folder of a finished run, or a mapping with the name and args of its model.
        weights: the source of the weights that it starts from: a run, a file or ``timm:NAME``; by default the run.
        **kwargs: options of :func:`stepsnet.grow`; others are arguments of the model that grows.

    Raises:
        UserError: the folder is not that of a finished run, or as :func:`stepsnet.grow`.
    """
    return _grown(_before(_with_source(ModelSpec(NAME, kwargs))), kwargs)


def with_sources(recipe: R) -> R:
    """The recipe with the model of a run in place of the run's folder; other models stay as they are.

    Raises:
        UserError: a folder that is not that of a finished run, a run of another task, or ``init`` beside a grown model.
    """
    changes: dict[str, Any] = {}
    for key in ("model", "baseline"):
        spec = getattr(recipe, key)
        if spec is not None and spec.name == NAME:
            changes[key] = _with_source(spec, recipe.task)
    if "model" in changes and (init := getattr(recipe, "init", None)):
        raise UserError(f"init: got {init} beside a model that grows, expected its weights in {_KEY}.weights")
    return dataclasses.replace(recipe, **changes) if changes else recipe


def _with_source(spec: ModelSpec, task: str | None = None) -> ModelSpec:
    args = dict(spec.args)
    model, weights = args.get("model"), args.get("weights")
    if isinstance(model, str) and (Path(model).is_dir() or not timm.is_model(model)):
        source = _finished(Path(model), task)
        args["model"], args["weights"] = dataclasses.asdict(source.model), weights or model
    elif isinstance(model, str):
        args["model"] = {"name": model, "args": {}}
    inner = args.get("model")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or set(inner) - {"name", "args"}:
        raise UserError(f"{_KEY}.model: got {str(inner)[:60]}, expected the folder of a finished run, or name and args")
    if not isinstance(args.get("weights"), str):
        raise UserError(f"{_KEY}.weights: got none, expected those of {inner['name']}: a run, a file or timm:NAME")
    # the arguments that the data decide are looked up among the model's own
    shared = {key: value for key, value in (inner.get("args") or {}).items() if key in SHARED_ARGS}
    return ModelSpec(NAME, {**shared, **args})


def _finished(folder: Path, task: str | None) -> Recipe:
    if not (folder / CONFIG).exists():
        raise UserError(f"{_KEY}.model: got {folder}, expected the folder of a finished run (it has no config.yaml)")
    source = read_run_recipe(folder)
    if not has_ended(folder):
        raise UserError(
            f"{_KEY}.model: {folder} has not ended, expected a finished run; `stepsnet resume {folder}` continues it"
        )
    if task is not None and source.task != task:
        raise UserError(f"{_KEY}.model: {folder} is a run of {source.task}, expected one of {task}")
    return source


def _before(spec: ModelSpec) -> nn.Module:
    """The network that grows, with random weights."""
    inner = spec.args["model"]
    more = {key: value for key, value in spec.args.items() if key not in _OPTIONS | {"model", "weights"}}
    return build_model(ModelSpec(inner["name"], {**(inner.get("args") or {}), **more}), pretrained=False)


def _grown(model: nn.Module, args: Mapping[str, Any]) -> nn.Module:
    return grow(model, **{key: value for key, value in args.items() if key in _OPTIONS})


def start_grown(model: nn.Module, recipe: Recipe) -> list[str]:
    """Put trained weights into a grown network, which then computes what the trained one does.

    Args:
        model: the recipe's model, as it is built; on the meta device, only the fit of a run's weights is checked.
        recipe: if its model is not a grown one, nothing is done.

    Returns:
        Lines that tell the user what was done.

    Raises:
        UserError: the weights cannot be read, or do not fit the network before it has grown.
    """
    if recipe.model.name != NAME:
        return []
    source = recipe.model.args["weights"]
    is_meta = next(model.parameters()).is_meta
    with torch.device("meta") if is_meta else nullcontext():
        before = _before(recipe.model)
    takes_all = Path(source).is_dir() or hasattr(before, "config")
    # from a file only what fits is taken: a head for other classes is drawn anew, and positions may be resized
    those = source if takes_all else f"the network before it grew, with what fits of {source}"
    lines = [f"grown from {source}: {_described(model)}; at the start its outputs are those of {those}"]
    if is_meta:
        if Path(source).is_dir():
            check_fit(before, _read(before, source))
        return lines
    if takes_all:
        load_into(before, _read(before, source))
    else:
        lines.append(start_from(before, source, f"{_KEY}.weights"))
    model.load_state_dict(_grown(before, recipe.model.args).state_dict())
    return lines


def _read(before: nn.Module, source: str) -> Mapping[str, Any]:
    return retied(before, read_pretrained(source, f"{_KEY}.weights"))


def _described(model: nn.Module) -> str:
    """Widths and blocks of each step, such as ``48×4, 68×2``."""
    return steps_as_text(steps_of(widths_of(model)))
