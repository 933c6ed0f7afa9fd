"""Build a model from its name and arguments: image classifiers of timm or stepsnet, and models of other tasks."""

from __future__ import annotations

import importlib

import timm
from timm.data import resolve_model_data_config
from torch import nn

from ..config import ModelSpec
from ..errors import UserError, nearest

__all__ = ["DETECTORS", "build_model", "check_model_name", "input_size_of"]

# Models that are not registered with timm: the function `create` of the module with that name in stepsnet.models.
DETECTORS = {"mask_rcnn": True, "cascade_mask_rcnn": True, "faster_rcnn": False, "cascade_rcnn": False}  # has masks
NOT_IN_TIMM = ("steps_transformer", "stepify", "upernet", *DETECTORS)


def build_model(spec: ModelSpec) -> nn.Module:
    """Build the model that a recipe names, with random weights.

    Raises:
        UserError: an unknown name, or arguments that the model does not accept.
    """
    check_model_name(spec)
    try:
        if spec.name in NOT_IN_TIMM:
            return importlib.import_module(f"stepsnet.models.{spec.name}").create(**spec.args)
        return timm.create_model(spec.name, **spec.args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {spec.name}: {' '.join(str(error.__cause__ or error).split())}") from error


def check_model_name(spec: ModelSpec) -> None:
    """Raises UserError, with the nearest names, for a model that does not exist."""
    if spec.name not in NOT_IN_TIMM and not timm.is_model(spec.name):
        known = [*NOT_IN_TIMM, *timm.list_models()]
        raise UserError(f"model: got {spec.name!r}, expected a timm or StepsNet model{nearest(spec.name, known)}")


def input_size_of(spec: ModelSpec, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the images that a built model takes."""
    chans, height, width = resolve_model_data_config(model)["input_size"]
    # a model without such a patch embedding may be built for a size too, which its config does not tell
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None) or spec.args.get("img_size")
    if built_for:
        height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    return spec.args.get("in_chans", chans), height, width
