"""The input size of a classifier: the recipe's or the model's own, and whether the model accepts it."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from ...config import ClassificationRecipe, ModelSpec
from ...errors import UserError
from ...models.build import build_model, input_size_of

__all__ = ["check_input_size", "input_size"]


def input_size(recipe: ClassificationRecipe, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the model's inputs."""
    chans, *own = input_size_of(recipe.model, model)
    height, width = [recipe.img_size] * 2 if recipe.img_size else own
    return chans, height, width


def check_input_size(recipe: ClassificationRecipe, model: nn.Module) -> None:
    """Try a size other than the model's own on the meta device: some models accept any size, others only one.

    Raises:
        UserError: the model does not accept images of ``img_size``.
    """
    spec, side, own = recipe.model, recipe.img_size, input_size_of(recipe.model, model)
    size = input_size(recipe, model)
    reason = None
    if size != own:
        with suppress(UserError):  # a model that cannot be built on the meta device is not checked
            reason = _refusal(spec, size)
    if reason is None:
        return
    with suppress(UserError):
        if _refusal(ModelSpec(spec.name, {**spec.args, "img_size": side}), size) is None:
            reason = f"{'baseline' if spec == recipe.baseline else 'model'}.args.img_size={side} builds it for {side}"
    expected = " × ".join(map(str, dict.fromkeys(own[1:])))
    raise UserError(f"img_size: got {side}, expected {expected}, the size that {spec.name} was built for ({reason})")


def _refusal(spec: ModelSpec, size: tuple[int, int, int]) -> str | None:
    """Why the model does not accept inputs of ``size``; None where it does. Raises UserError if it cannot be built."""
    with torch.device("meta"), torch.no_grad():  # a separate model, because a forward pass may leave caches behind
        model = build_model(spec)
        try:
            model.eval()(torch.empty(1, *size))
        except NotImplementedError:  # an operator that does not exist for the meta device
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
    return None
