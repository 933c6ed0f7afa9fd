"""The size of a classifier's pictures: the recipe's or the model's own, and whether the model takes it."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from ...config import ClassificationRecipe, ModelSpec
from ...errors import UserError
from ...models.build import build_model, input_size_of

__all__ = ["check_input_size", "input_size"]


def input_size(recipe: ClassificationRecipe, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of what the recipe feeds its model with."""
    chans, *own = input_size_of(recipe.model, model)
    height, width = [recipe.img_size] * 2 if recipe.img_size else own
    return chans, height, width


def check_input_size(recipe: ClassificationRecipe, model: nn.Module) -> None:
    """Run another size than the model's own through it, on the meta device: some models take any, others one.

    Raises:
        UserError: the model does not take pictures of ``img_size``.
    """
    spec, side, own = recipe.model, recipe.img_size, input_size_of(recipe.model, model)
    size = input_size(recipe, model)
    reason = None
    if size != own:
        with suppress(UserError):  # what cannot be built on the meta device cannot be asked
            reason = _refusal(spec, size)
    if reason is None:
        return
    with suppress(UserError):
        if _refusal(ModelSpec(spec.name, {**spec.args, "img_size": side}), size) is None:
            reason = f"{'baseline' if spec == recipe.baseline else 'model'}.args.img_size={side} builds it for {side}"
    expected = " × ".join(map(str, dict.fromkeys(own[1:])))
    raise UserError(f"img_size: got {side}, expected {expected}, the size that {spec.name} was built for ({reason})")


def _refusal(spec: ModelSpec, size: tuple[int, int, int]) -> str | None:
    """Why a model of this kind does not take such a picture; None where it does. Raises UserError as it is built."""
    with torch.device("meta"), torch.no_grad():  # a model of its own: a forward pass may leave caches behind
        model = build_model(spec)
        try:
            model.eval()(torch.empty(1, *size))
        except NotImplementedError:  # an operator that the meta device has not
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
    return None
