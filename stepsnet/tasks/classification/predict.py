"""The likeliest classes of images."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ...config import ClassificationRecipe
from ..prediction import PredictInputs, Prediction, load_trained
from .data import read_to_predict
from .task import build

__all__ = ["predict"]


@torch.no_grad()
def predict(run: Path, recipe: ClassificationRecipe, inputs: PredictInputs) -> list[Prediction]:
    """The likeliest classes of each image, with probabilities.

    Raises:
        UserError: a file that is missing or not an image; it is named, and nothing is predicted.
    """
    files = inputs.require_files(run, recipe)
    model, task = build(recipe, run=run)
    model, device = load_trained(run, recipe, model)
    classes = task.data.classes

    def read(file: Path) -> Tensor:
        with Image.open(file) as image:
            return task.data.read(image)

    images = read_to_predict(files, read)
    probabilities = torch.cat([model(image[None].to(device)).softmax(-1) for image in images])  # (files, classes)
    ranked = probabilities.topk(min(inputs.top, len(classes)))
    found = []
    for file, values, indices in zip(files, ranked.values.tolist(), ranked.indices.tolist()):
        by_class = {classes[index]: value for index, value in zip(indices, values)}
        line = f"{file}: " + ", ".join(f"{name} {100 * value:.1f}%" for name, value in by_class.items())
        found.append(Prediction(line, {"file": str(file), "classes": by_class}))
    return found
