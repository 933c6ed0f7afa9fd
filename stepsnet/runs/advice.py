"""Checks of settings, and warnings about unlikely ones, before they cost a training run."""

from __future__ import annotations

import os

from ..errors import UserError
from ..recipes import RECIPES
from ..settings.config import DenseRecipe, Recipe

__all__ = ["check_settings", "on_settings"]

_FACTOR = 4  # by which batch sizes must differ for a learning rate to be far from the one that suits


def check_settings(recipe: Recipe) -> None:
    """Refuse settings that no training can begin with, before a model is built.

    Raises:
        UserError: settings contradict each other, the optimizer does not accept them, or a batch exceeds the machine's
            memory.
    """
    from ..engine.optim import check_optimizer, check_rates

    check_rates(recipe)
    check_optimizer(recipe)
    _check_batch(recipe)


def on_settings(recipe: Recipe) -> list[str]:
    """Return warnings about settings that are probably unintended.

    They concern a schedule without effect or one that was changed in mid-run, a learning rate tuned for another batch
    size, and a detector or segmenter without a pretrained backbone. The last two are found by comparing with the
    shipped recipe of the same name.
    """
    lines = []
    if recipe.earlier_epochs:  # the recipe is the config of an earlier run
        parts = ", ".join(f"{epochs} until update {until}" for until, epochs in sorted(recipe.earlier_epochs))
        got = f"the schedule is that of {recipe.epochs} epochs, but that of {parts}"
        lines.append(f"earlier_epochs: {got}, as in the run that this config comes from")
    if recipe.sched == "multistep" and not any(milestone < recipe.epochs for milestone in recipe.milestones):
        lines.append(f"sched=multistep without milestones before epoch {recipe.epochs}: the learning rate stays at lr")
    if recipe.warmup_epochs >= recipe.epochs:
        lines.append(
            f"warmup_epochs {recipe.warmup_epochs:g} of {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}: the learning "
            f"rate only rises, to {recipe.epochs / recipe.warmup_epochs:.0%} of lr (a shorter warmup leaves "
            "epochs to train at lr)"
        )
    shipped = RECIPES.get(recipe.name)
    if shipped and recipe.lr_base_size is None and shipped.lr_base_size is None and recipe.lr == shipped.lr:
        factor = recipe.batch_size / shipped.batch_size
        if factor >= _FACTOR or factor <= 1 / _FACTOR:
            lines.append(
                f"lr {recipe.lr:g} is {shipped.name}'s for batches of {shipped.batch_size}, but batch_size is "
                f"{recipe.batch_size}: lr_base_size={shipped.batch_size} scales it"
            )
    if isinstance(recipe, DenseRecipe) and shipped and shipped.expected and not recipe.backbone:
        lines.append(
            f"backbone: none is given, so it starts from random weights; the results expected of {shipped.name} are "
            "those of a backbone trained on ImageNet (backbone=RUN, a file of weights, or timm:NAME)"
        )
    return lines


def _check_batch(recipe: Recipe) -> None:
    """Raises UserError if one image, the inputs of one forward pass or a language model's outputs exceed memory."""
    from ..machine import host_memory

    batch = -(-recipe.batch_size // recipe.accumulation_steps)
    most = host_memory() * int(os.environ.get("WORLD_SIZE", "1"))
    for keys, samples, numbers in recipe.sizes_in_memory(batch):
        if (needed := 4 * samples * numbers) > most:
            raise UserError(
                f"{keys}: {samples} × {numbers:,.0f} numbers take {needed / 2**30:,.0f} GiB, expected at most the "
                f"{most / 2**30:.0f} GiB of memory"
            )
