"""A segmenter for use without stepsnet: one forward pass over an image, or over a window of it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import nn

from ...models.upernet import UPerNet
from ...settings.config import SegmentationRecipe
from ..class_names import read_classes
from ..deployment import Deployment
from .task import inference_of

__all__ = ["deployment"]


def deployment(run: Path, recipe: SegmentationRecipe, model: nn.Module) -> Deployment:
    """How to use the model without stepsnet. Raises UserError if the run has no class names."""
    inference = inference_of(recipe, cast(UPerNet, model))
    side = recipe.eval_window or recipe.crop_size
    return Deployment(
        task=recipe.task,
        shape=(3, side, side),
        preprocessing={
            "mode": "RGB",
            "input_size": (3, side, side),
            "mean": inference.mean,
            "std": inference.std,
            "interpolation": "bilinear",
            # the bounds that an image is resized to fit, as is usual for COCO and ADE20K; a recipe may give them in
            # either order
            "longest_and_shortest_side": (max(recipe.scale), min(recipe.scale)),
        },
        classes=read_classes(run),
    )
