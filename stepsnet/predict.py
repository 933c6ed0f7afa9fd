"""Use a run: the classes of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from .errors import UserError
from .run import recipe_of, trained_model
from .tasks.classification import Classification
from .tasks.image_data import UNREADABLE
from .tasks.setup import set_up

__all__ = ["classify"]


@torch.no_grad()
def classify(folder: Path, files: Sequence[Path], top: int = 5) -> list[tuple[Path, list[tuple[str, float]]]]:
    """The likeliest classes of each picture, with probabilities.

    Raises:
        UserError: a file that is missing or no picture; it is named, and nothing is predicted.
    """
    recipe = recipe_of(folder)
    if recipe.task != "classification":
        raise UserError(f"predict: {folder} is a run of {recipe.task}, expected one of classification for pictures")
    setup = set_up(recipe)
    assert isinstance(setup.task, Classification)
    images = setup.task.data
    model, device = trained_model(folder, recipe, setup.model)
    inputs = []
    for file in files:
        try:
            with Image.open(file) as picture:
                inputs.append(images.read(picture))
        except UNREADABLE as error:
            reason = "no such file" if not file.exists() else str(error).split(":")[0]
            raise UserError(f"predict: cannot read {file} as a picture: {reason}") from None
    probabilities = torch.cat([model(x[None].to(device)).softmax(-1) for x in inputs])  # (files, classes)
    ranked = probabilities.topk(min(top, len(images.classes)))
    return [
        (file, [(images.classes[i], p) for p, i in zip(values.tolist(), indices.tolist())])
        for file, values, indices in zip(files, ranked.values, ranked.indices)
    ]
