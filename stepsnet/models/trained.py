"""A run's model with its trained weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..run_folder.checkpoint import load_into
from ..run_folder.folder import read_weights
from ..settings.config import LanguageRecipe, Recipe
from .build import build_model, fit_positions

__all__ = ["trained_model", "untrained_model"]


def trained_model(run: Path, recipe: Recipe, model: nn.Module | None = None) -> nn.Module:
    """A run's model with its final weights, or those of its latest checkpoint, on the CPU and in evaluation mode.

    Args:
        model: the one that its task has built, if any; it gets the weights.

    Raises:
        UserError: the run has no weights, or they do not fit the model.
    """
    if model is None:
        model = untrained_model(recipe)
    load_into(model, read_weights(run))
    return model.eval()


def untrained_model(recipe: Recipe) -> nn.Module:
    """A recipe's model as its task builds it, but without the pretrained weights that the recipe may begin from."""
    model = build_model(recipe.model, pretrained=False)
    if isinstance(recipe, LanguageRecipe):
        fit_positions(model, recipe.seq_len)
    return model
