"""Settings that are seldom meant, told before they cost a training."""

from __future__ import annotations

import os

from ..config import ClassificationRecipe, LanguageRecipe, Recipe, SegmentationRecipe
from ..errors import UserError
from ..recipes import RECIPES

__all__ = ["on_settings"]

_FACTOR = 4  # of the batch size, from which on a learning rate is far from the one that suits


def on_settings(recipe: Recipe) -> list[str]:
    """A line for a schedule that does not do what it seems to, and for a rate that is meant for another batch size.

    What a rate is meant for is known of a recipe that has a shipped one's name and rate.

    Raises:
        UserError: settings that contradict each other, that the optimizer does not take, or with which a batch exceeds
            the machine's memory.
    """
    from ..engine.optim import check_optimizer, check_rates

    check_rates(recipe)
    check_optimizer(recipe)
    _check_batch(recipe)
    lines = []
    if recipe.sched == "multistep" and not any(milestone < recipe.epochs for milestone in recipe.milestones):
        lines.append(f"sched=multistep without milestones before epoch {recipe.epochs}: the learning rate stays at lr")
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


def _check_batch(recipe: Recipe) -> None:
    """Raises UserError where the inputs of one forward pass alone, or a language model's outputs, exceed the memory."""
    from ..device import host_memory

    key, values = "", 0  # of a sample
    if isinstance(recipe, ClassificationRecipe):
        key, side = "img_size", recipe.img_size or recipe.model.args.get("img_size")
        values = 3 * side**2 if isinstance(side, int) else 0
    elif isinstance(recipe, SegmentationRecipe):
        key, values = "crop_size", 3 * recipe.crop_size**2
    elif isinstance(recipe, LanguageRecipe):
        key, values = "seq_len", recipe.seq_len * recipe.model.args.get("vocab_size", 1)
    samples = -(-recipe.batch_size // recipe.accumulation_steps)
    if 4 * values * samples > host_memory() * int(os.environ.get("WORLD_SIZE", "1")):
        raise UserError(
            f"{key} and batch_size: {samples} samples of {values:,} numbers take "
            f"{4 * values * samples / 2**30:,.0f} GiB, expected at most the {host_memory() / 2**30:.0f} GiB of memory"
        )
