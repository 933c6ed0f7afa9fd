"""Settings that are seldom meant, told before they cost a training."""

from __future__ import annotations

from ..config import Recipe
from ..recipes import RECIPES

__all__ = ["on_settings"]

_FACTOR = 4  # of the batch size, from which on a learning rate is far from the one that suits


def on_settings(recipe: Recipe) -> list[str]:
    """A line for a warmup that does not end, and for a learning rate that is meant for another batch size.

    What a rate is meant for is known of a recipe that has a shipped one's name and rate.
    """
    lines = []
    if recipe.warmup_epochs >= recipe.epochs:
        lines.append(
            f"warmup_epochs {recipe.warmup_epochs:g} of {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}: the learning "
            f"rate only rises, to {recipe.epochs / recipe.warmup_epochs:.0%} of lr; a shorter warmup leaves time at lr"
        )
    shipped = RECIPES.get(recipe.name)
    if shipped and recipe.lr_base_size is None and shipped.lr_base_size is None and recipe.lr == shipped.lr:
        factor = recipe.batch_size / shipped.batch_size
        if factor >= _FACTOR or factor <= 1 / _FACTOR:
            lines.append(
                f"lr {recipe.lr:g} is {shipped.name}'s for batches of {shipped.batch_size}, and batch_size is "
                f"{recipe.batch_size}: lr_base_size={shipped.batch_size} scales it"
            )
    return lines
