"""A model from its name and arguments: timm's and ours for pictures, and whole models of other tasks."""

from __future__ import annotations

import importlib

import timm
from timm.data import resolve_model_data_config
from torch import nn

from ..errors import UserError, nearest
from ..recipes.recipe import ModelSpec

__all__ = ["build_model", "input_size_of"]

# models that are not timm's, by the module whose ``create`` makes them
OTHERS = {
    "steps_transformer": "stepsnet.models.steps_transformer",
    "upernet": "stepsnet.models.upernet",
}


def build_model(spec: ModelSpec) -> nn.Module:
    """Raises UserError for a name that is not known, or arguments that the model does not take."""
    try:
        if spec.name in OTHERS:
            return importlib.import_module(OTHERS[spec.name]).create(**spec.args)
        if timm.is_model(spec.name):
            return timm.create_model(spec.name, **spec.args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {spec.name}: {' '.join(str(error.__cause__ or error).split())}") from error
    known = [*OTHERS, *timm.list_models()]
    raise UserError(f"model: got {spec.name!r}, expected a timm or StepsNet model{nearest(spec.name, known)}")


def input_size_of(spec: ModelSpec, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the pictures that a built model takes."""
    chans, height, width = resolve_model_data_config(model)["input_size"]
    height, width = getattr(getattr(model, "patch_embed", None), "img_size", None) or (height, width)
    return spec.args.get("in_chans", chans), height, width
