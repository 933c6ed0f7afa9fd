"""What a detector finds in pictures: drawn on them, and as COCO's result records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask

from ...config import DetectionRecipe
from ...files import picture_bytes, write_atomically
from ...models.build import build_model
from ..classification.data import read_to_predict
from ..prediction import PredictInputs, Prediction, load_trained
from .data import open_image
from .task import found_objects, read_categories

__all__ = ["drawn", "predict"]

_COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (230, 159, 0))  # Okabe-Ito
_OPACITY = 0.45  # of a mask

Record = dict[str, Any]


@torch.no_grad()
def predict(run: Path, recipe: DetectionRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write a PNG for each image, and ``predictions.json`` with every object in COCO's result form.

    Returns:
        For each image its objects: COCO's records with the file's name, where image_id counts the files from 1.

    Raises:
        UserError: a file that is missing or not an image, before anything is written.
    """
    files, out = inputs.require_files(run, recipe), inputs.out
    names = {category["id"]: category["name"] for category in read_categories(run)}
    model, device = load_trained(run, recipe, build_model(recipe.model))
    predictions: list[Prediction] = []
    for number, (file, image) in enumerate(zip(files, read_to_predict(files, open_image)), 1):
        (objects,) = model([image.to(device)])
        found = [{**record, "file_name": str(file)} for record in found_objects(objects, number, list(names))]
        shown = [record for record in found if record["score"] >= inputs.min_score]
        again = sum(other.stem == file.stem for other in files) > 1
        path = out / f"{f'{number}-' if again else ''}{file.stem}.png"
        pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
        write_atomically(path, picture_bytes(drawn(pixels, shown, names)))
        what = ", ".join(f"{names[record['category_id']]} {record['score']:.2f}" for record in shown[:5])
        more = f", … ({len(shown)} objects)" if len(shown) > 5 else ""
        line = f"{file}: {what or f'nothing above a score of {inputs.min_score}'}{more} → {path}"
        predictions.append(Prediction(line, found))
    records = [record for prediction in predictions for record in prediction.record]
    write_atomically(out / "predictions.json", json.dumps(records) + "\n")
    return predictions


def drawn(pixels: np.ndarray, records: Sequence[Record], names: dict[int, str]) -> Image.Image:
    """Masks, boxes, and the category and score of each object, the surest on top. pixels: (H, W, 3) of bytes."""
    blended = pixels.astype(np.float32)
    surest_last = sorted(enumerate(records), key=lambda pair: pair[1]["score"])
    for index, record in surest_last:
        inside = coco_mask.decode(record["segmentation"]).astype(bool)
        tint = np.asarray(_COLOURS[index % len(_COLOURS)], dtype=np.float32)
        blended[inside] = (1 - _OPACITY) * blended[inside] + _OPACITY * tint
    picture = Image.fromarray(blended.round().astype(np.uint8))
    pen, size = ImageDraw.Draw(picture), max(10, min(picture.size) // 30)
    font = ImageFont.load_default(size)
    for index, record in surest_last:
        x, y, width, height = record["bbox"]
        colour = _COLOURS[index % len(_COLOURS)]
        pen.rectangle((x, y, x + width, y + height), outline=colour, width=max(1, size // 6))
        text = f"{names[record['category_id']]} {record['score']:.2f}"
        place = (max(0, min(x, picture.width - pen.textlength(text, font=font))), max(0, y - size - 2))
        pen.rectangle(pen.textbbox(place, text, font=font), fill=colour)
        pen.text(place, text, fill="white", font=font)
    return picture
