"""A classifier for those who have neither stepsnet nor timm."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...settings.config import ClassificationRecipe
from ..deployment import Deployment
from ..images import mode_of
from .inputs import data_config
from .predict import classes_of

__all__ = ["deployment"]


def deployment(run: Path, recipe: ClassificationRecipe, model: nn.Module) -> Deployment:
    """Describe how a run's classifier is used. Raises UserError if its class names are missing or do not fit it."""
    config = data_config(recipe, model)
    return Deployment(
        task=recipe.task,
        shape=tuple(config["input_size"]),
        preprocessing={"mode": mode_of(config["input_size"][0]), **config},
        classes=classes_of(run, model),
    )
