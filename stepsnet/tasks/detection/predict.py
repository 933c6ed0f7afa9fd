"""What a detector finds in images: drawn on them, and as records."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from torchvision.transforms.v2.functional import to_pil_image

from ...settings.config import DetectionRecipe
from ..images import png_bytes
from ..prediction import PredictInputs, Prediction, origin_of, read_again
from .data import read_pixels
from .drawing import draw_objects
from .scores import class_names, found_objects
from .task import read_categories

__all__ = ["predict"]


@torch.no_grad()
def predict(run: Path, recipe: DetectionRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write a PNG for each image, and ``predictions.json`` with the objects of all images.

    Returns:
        The objects of each image: COCO's result records with ``file_name`` in place of ``image_id``, which only the
        user's own annotations can tell, and with the name of the category.

    Raises:
        UserError: a file is missing or is not an image, or a result would replace something that is not ours;
            nothing is written then.
    """
    inputs.require_files(run, recipe)
    names = class_names(read_categories(run))
    model, device = inputs.model_of(run, recipe)
    inputs, outputs = inputs.readable(read_pixels), inputs.outputs
    paths, listed = outputs.paths(inputs.places, ".png"), outputs.folder / "predictions.json"
    predictions: list[Prediction] = []
    with outputs.reserved([*paths, listed] if inputs.writes else [], inputs.places):
        images = read_again(inputs.files, read_pixels)
        for file, path, image in zip(inputs.files, paths, images):
            (objects,) = model([image.to(device)])
            found = [
                {**record, "category": names[record["category_id"]], **origin_of(file, "file_name")}
                for record in found_objects(objects, list(names))
            ]
            shown = [record for record in found if record["score"] >= inputs.min_score]
            if inputs.writes:
                drawn = draw_objects((image * 255).round().byte(), shown, names)
                outputs.write(path, png_bytes(to_pil_image(drawn)))
            what = ", ".join(f"{record['category']} {record['score']:.2f}" for record in shown[:5])
            more = f", … ({len(shown)} objects)" if len(shown) > 5 else ""
            line = f"{file}: {what or f'nothing above a score of {inputs.min_score}'}{more} → {path}"
            counts = Counter(record["category"] for record in shown)
            answer = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
            predictions.append(Prediction(line, found, str(file), answer))
        if inputs.writes:
            records = [record for prediction in predictions for record in prediction.record]
            outputs.write(listed, json.dumps(records) + "\n")
    return predictions
