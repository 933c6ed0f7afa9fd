"""The likeliest classes of images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...settings.config import ClassificationRecipe
from ..class_names import CLASSES_FILE, read_classes
from ..images import open_image
from ..prediction import File, PredictInputs, Prediction, origin_of, read_again
from .data import evaluation_transform
from .inputs import input_spec

__all__ = ["classes_of", "predict"]


@torch.no_grad()
def predict(run: Path, recipe: ClassificationRecipe, inputs: PredictInputs) -> list[Prediction]:
    """The ``inputs.top`` likeliest classes of each image, with probabilities.

    With ``inputs.out`` they are written there too, as ``predictions.json``.

    Raises:
        UserError: a file is missing or is not an image, or the result would replace somebody else's file; nothing is
            predicted in that case.
    """
    files = inputs.require_files(run, recipe)
    listed = inputs.outputs.folder / "predictions.json"
    with inputs.outputs.reserved([listed] if inputs.out else [], inputs.places) as outputs:
        predictions = _classify(run, recipe, inputs) if files else []
        if inputs.out:
            outputs.write(listed, json.dumps([prediction.record for prediction in predictions], indent=1) + "\n")
    return predictions


def _classify(run: Path, recipe: ClassificationRecipe, inputs: PredictInputs) -> list[Prediction]:
    model, device = inputs.model_of(run, recipe)
    transform = evaluation_transform(recipe.data, input_spec(recipe, model))
    classes = classes_of(run, model)

    def read(file: File) -> Tensor:
        return transform(open_image(file))

    files = inputs.readable(read).files
    if not files:
        return []
    images = read_again(files, read)
    probabilities = torch.cat([model(image[None].to(device)).softmax(-1) for image in images])  # (files, classes)
    ranked = probabilities.topk(min(inputs.top, len(classes)))
    predictions = []
    for file, values, indices in zip(files, ranked.values.tolist(), ranked.indices.tolist()):
        by_class = {classes[index]: value for index, value in zip(indices, values)}
        line = f"{file}: " + ", ".join(f"{name} {100 * value:.1f}%" for name, value in by_class.items())
        predictions.append(Prediction(line, {**origin_of(file), "classes": by_class}, str(file), classes[indices[0]]))
    return predictions


def classes_of(run: Path, model: nn.Module) -> list[str]:
    """The run's class names. Raises UserError if they cannot be read, or are not as many as the model's outputs."""
    classes = read_classes(run)
    expected = getattr(model, "num_classes", len(classes))
    if len(classes) != expected:
        raise UserError(f"run: got {len(classes)} names in {run / CLASSES_FILE}, expected the model's {expected}")
    return classes
