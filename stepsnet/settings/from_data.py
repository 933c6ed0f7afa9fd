"""What a recipe leaves open for its data to decide: arguments of the model, and the size of a classifier's input.

``resolve`` in each task's package decides; a run's ``config.yaml`` holds what was decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from .config import ClassificationRecipe, LanguageRecipe, ModelSpec, Recipe

__all__ = [
    "SHARED_ARGS",
    "as_begun",
    "check_class_count",
    "given_args",
    "key_of_model",
    "key_of_weights",
    "leaves_open",
    "with_args",
    "with_baseline",
    "with_classes",
]

R = TypeVar("R", bound=Recipe)

SHARED_ARGS = ("num_classes", "in_chans", "img_size")  # of the model


def given_args(spec: ModelSpec | None) -> dict[str, Any]:
    """The model's arguments, without those that null leaves to the data."""
    args = spec.args if spec else {}
    return {name: value for name, value in args.items() if value is not None or name not in SHARED_ARGS}


def leaves_open(recipe: Recipe) -> bool:
    """Whether the data decide anything about the recipe's model."""
    if isinstance(recipe, LanguageRecipe):
        return False
    return "num_classes" not in given_args(recipe.model) or getattr(recipe, "img_size", None) == "data"


def key_of_model(recipe: Recipe) -> str:
    """The key under which a user finds the recipe's model: "baseline" if it is the baseline, or else "model"."""
    return "baseline" if recipe.model == recipe.baseline else "model"


def key_of_weights(recipe: Recipe, key: str) -> str:
    """The key under which a user finds the weights that the recipe's model starts from."""
    return f"baseline_{key}" if key_of_model(recipe) == "baseline" else key


def with_args(recipe: R, args: Mapping[str, Any], **changes: Any) -> R:
    """The recipe with these arguments for its model, and for its baseline if that is the same."""
    model = ModelSpec(recipe.model.name, dict(args))
    baseline = model if recipe.model == recipe.baseline else recipe.baseline
    return dataclasses.replace(recipe, model=model, baseline=baseline, **changes)


def with_baseline(recipe: R, of_baseline: Recipe) -> R:
    """The recipe of a comparison, from the recipes of its two models with what the data decide filled in.

    Raises:
        UserError: different shares of the images would be evaluated for the two.
    """
    both = dataclasses.replace(recipe, baseline=of_baseline.model)
    if isinstance(both, ClassificationRecipe) and isinstance(of_baseline, ClassificationRecipe):
        if both.crop_pct != of_baseline.crop_pct:
            raise UserError(
                "crop_pct: got null, which is 1 for the model whose size is left to the data and the other model's "
                "own, expected a number for both, such as 1"
            )
        # one model may have a size in its arguments and the other none; each run decides again when it is resumed
        size = both.img_size if both.img_size == of_baseline.img_size else "data"
        mode = both.crop_mode if both.crop_mode == of_baseline.crop_mode else None  # each has its own
        return dataclasses.replace(both, img_size=size, crop_mode=mode)
    return both


def with_classes(recipe: R, count: int) -> tuple[R, list[str]]:
    """The recipe with a model of ``count`` classes, if their number is open, and a line that says so."""
    args = given_args(recipe.model)
    if "num_classes" in args:
        return recipe, []
    return with_args(recipe, {**args, "num_classes": count}), [f"num_classes {count}, from the data"]


def check_class_count(recipe: Recipe, got: int | None, expected: int, run: Path | None = None) -> None:
    """Raises UserError if the recipe's model has ``got`` classes, and not the ``expected`` ones of the data.

    Args:
        run: the folder of the run in which the model was trained.
    """
    if got is not None and got != expected:
        if run is not None:
            raise UserError(f"data: got {expected} classes, expected the {got} that {run} was trained on")
        key = f"{key_of_model(recipe)}.args.num_classes"
        raise UserError(f"{key}: got {got}, expected the data's {expected} (null takes them from the data)")


def as_begun(recipe: R, begun: Recipe) -> R:
    """The recipe with its open fields filled from the recipe of a run that has begun."""
    changes: dict[str, Any] = {}
    for key in ("model", "baseline"):
        own, theirs = getattr(recipe, key), getattr(begun, key)
        if own and theirs and own.name == theirs.name:
            given, decided = given_args(own), given_args(theirs)
            more = {name: decided[name] for name in SHARED_ARGS if name in decided and name not in given}
            changes[key] = ModelSpec(own.name, {**given, **more})
    for key, mark in recipe.left_open.items():
        if getattr(recipe, key) == mark:
            changes[key] = getattr(begun, key, mark)
    return dataclasses.replace(recipe, **changes)
