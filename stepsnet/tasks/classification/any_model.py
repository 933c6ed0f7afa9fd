"""Scoring a timm or StepsNet model on a data set without a run whose recipe says how."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...models.build import build_model, check_model_name
from ...settings.config import ClassificationRecipe, ModelSpec
from ...settings.from_data import check_class_count, with_classes
from .data import open_images
from .resolve import with_crop_mode
from .task import Classification, task_of

__all__ = ["build_by_name"]


def build_by_name(name: str, args: dict[str, Any], data: str) -> tuple[nn.Module, Classification]:
    """A new model, and the task that scores it on the validation split at the model's own input size.

    Args:
        args: the model's arguments; without ``num_classes``, it has as many classes as the data.

    Raises:
        UserError: the model or the data do not exist, or do not fit each other.
    """
    recipe = ClassificationRecipe(name="eval", model=ModelSpec(name, args), data=data, batch_size=1)
    check_model_name(recipe.model)  # opening the data may take long
    opened = open_images(data)
    recipe, _ = with_classes(recipe, len(opened.splits.classes))
    recipe, _ = with_crop_mode(recipe, opened)
    model = build_model(recipe.model, pretrained=False)
    task = task_of(recipe, model, data, opened, for_training=False)
    check_class_count(recipe, getattr(model, "num_classes", None), len(opened.splits.classes))
    return model, task
