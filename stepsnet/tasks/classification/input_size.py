"""The input size of a classifier: the recipe's, its images' or the model's own, and whether the model accepts it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import nn

from ...errors import UserError, in_a_line
from ...macs import OF_MODULES
from ...models.build import build_model, input_size_of
from ...settings.config import ClassificationRecipe, ModelSpec
from ...settings.from_data import given_args, key_of_model, with_args

__all__ = ["check_input_size", "fit_input_size", "input_size"]


def input_size(recipe: ClassificationRecipe, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the model's inputs."""
    chans, *own = input_size_of(recipe.model, model)
    height, width = [recipe.img_size] * 2 if isinstance(recipe.img_size, int) else own
    return chans, height, width


def fit_input_size(recipe: ClassificationRecipe, side: int) -> ClassificationRecipe:
    """The recipe with inputs of ``side`` × ``side``, for a model whose arguments leave the size open.

    A model that accepts any size stays as it is; any other is built for this one. If the size is that of the images
    (``img_size: data``), the model is built for it whenever that is possible.

    Raises:
        UserError: the model does not accept this size, or not even its own.
    """
    of_images = recipe.img_size == "data"
    as_it_is = with_args(recipe, given_args(recipe.model), img_size=side)
    built = with_args(recipe, {**given_args(recipe.model), "img_size": side}, img_size=None if of_images else side)
    reasons = []
    for fitted in (built, as_it_is) if of_images else (as_it_is, built):
        with suppress(UserError):  # a model without this argument
            reason = _refusal(fitted.model, side)
            if reason is None:
                return fitted
            reasons.append(reason)
    if not reasons:  # it cannot be built on the meta device at all: building it for real reports what is wrong
        return as_it_is
    _check_own_size(recipe)
    got = f"{side}, the side of the training images" if of_images else side
    why = reasons[0 if of_images else -1]  # of the model that was built for this size
    raise UserError(f"img_size: got {got}, expected {_accepted(recipe.model, side)} ({why})")


def _accepted(spec: ModelSpec, side: int) -> str:
    with torch.device("meta"):
        model = build_model(spec, pretrained=False)
    patch = _patch_of(model)
    if patch and side % patch:
        multiple = -(-side // patch) * patch
        return f"a multiple of {patch}, the side of a patch of {spec.name}, such as img_size={multiple}"
    own = " × ".join(map(str, dict.fromkeys(input_size_of(spec, model)[1:])))
    return f"{own}, the size that {spec.name} was built for"


def check_input_size(recipe: ClassificationRecipe, side: int, model: nn.Module) -> None:
    """Try a size other than the model's own on the meta device: some models accept any size, others only one.

    Raises:
        UserError: the model does not accept images of ``side`` × ``side``, or not even images of its own size.
    """
    spec, own = recipe.model, input_size_of(recipe.model, model)
    reason = None
    if own[1:] != (side, side):
        with suppress(UserError):  # a model that cannot be built on the meta device is not checked
            reason = _refusal(spec, side)
    if reason is None:
        return
    _check_own_size(recipe)
    with suppress(UserError):
        if _refusal(ModelSpec(spec.name, {**spec.args, "img_size": side}), side) is None:
            reason = f"{key_of_model(recipe)}.args.img_size={side} builds it for {side}"
    expected = " × ".join(map(str, dict.fromkeys(own[1:])))
    raise UserError(f"img_size: got {side}, expected {expected}, the size that {spec.name} was built for ({reason})")


def _check_own_size(recipe: ClassificationRecipe) -> None:
    """Raises UserError if the model fails even at the size that it was built for: then the size is not to blame."""
    if (reason := _refusal(recipe.model)) is not None:
        raise UserError(f"{key_of_model(recipe)}: {recipe.model.name} fails at its own size too: {reason}")


def _refusal(spec: ModelSpec, side: int | None = None) -> str | None:
    """Why the model does not accept inputs of this size; None if it does. Raises UserError if it cannot be built.

    Args:
        side: by default the model's own size.
    """
    with torch.device("meta"), torch.no_grad():  # a separate model, because a forward pass may leave caches behind
        model = build_model(spec, pretrained=False)
        chans, *own = input_size_of(spec, model)
        if side is not None and (patch := _patch_of(model)) and side % patch:
            return f"its patches of {patch} pixels do not divide {side}"
        try:
            model.eval()(torch.empty(1, chans, *(own if side is None else (side, side))))
        except NotImplementedError:  # an operator that does not exist for the meta device
            return None
        except OF_MODULES as error:
            return in_a_line(error, 200)
    return None


def _patch_of(model: nn.Module) -> int | None:
    """The side of a model's patches, if it drops the pixels that they do not cover; else None."""
    embedding: Any = getattr(model, "patch_embed", None)
    if isinstance(embedding, PatchEmbed) and not embedding.dynamic_img_pad:
        return max(embedding.patch_size)
    return None
