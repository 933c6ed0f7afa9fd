"""What a detector finds in images: drawn on them, and as COCO's result records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ...colors import OKABE_ITO
from ...config import DetectionRecipe
from ...files import png_bytes
from ..prediction import PredictInputs, Prediction, origin_of, read_files
from .data import read_pixels
from .task import found_objects, read_categories

__all__ = ["draw_objects", "predict"]

_COLORS = OKABE_ITO[:6]  # without black
_OPACITY = 0.45  # of a mask

Record = dict[str, Any]


@torch.no_grad()
def predict(run: Path, recipe: DetectionRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write a PNG for each image, and ``predictions.json`` with every object in COCO's result form.

    Returns:
        For each image its objects: COCO's records with the names of the category and of the file, where image_id
        counts the images from 1.

    Raises:
        UserError: a file is missing or is not an image, or something of somebody else's is where a result would be;
            then nothing is written.
    """
    files, outputs = inputs.require_files(run, recipe), inputs.outputs
    names = {category["id"]: category["name"] for category in read_categories(run)}
    model, device = inputs.model_of(run, recipe)
    paths, listed = outputs.paths(inputs.places, ".png"), outputs.folder / "predictions.json"
    predictions: list[Prediction] = []
    with outputs.reserved([*paths, listed] if inputs.writes else [], inputs.places):
        for number, (file, path, image) in enumerate(zip(files, paths, read_files(files, read_pixels)), 1):
            (objects,) = model([image.to(device)])
            found = [
                {**record, "category": names[record["category_id"]], **origin_of(file, "file_name")}
                for record in found_objects(objects, number, list(names))
            ]
            shown = [record for record in found if record["score"] >= inputs.min_score]
            if inputs.writes:
                drawn = draw_objects((image * 255).round().byte(), shown, names)
                outputs.write(path, png_bytes(to_pil_image(drawn)))
            what = ", ".join(f"{record['category']} {record['score']:.2f}" for record in shown[:5])
            more = f", … ({len(shown)} objects)" if len(shown) > 5 else ""
            line = f"{file}: {what or f'nothing above a score of {inputs.min_score}'}{more} → {path}"
            predictions.append(Prediction(line, found))
        if inputs.writes:
            records = [record for prediction in predictions for record in prediction.record]
            outputs.write(listed, json.dumps(records) + "\n")
    return predictions


def draw_objects(image: Tensor, records: Sequence[Record], names: dict[int, str]) -> Tensor:
    """Draw the mask, the box, and the category and score of each object, those with the highest score on top.

    Args:
        image: (3, H, W) uint8.
        records: COCO's result records.
        names: of the categories, by their id.
    """
    if not records:
        return image
    records = sorted(records, key=lambda record: record["score"])
    colors = [_COLORS[index % len(_COLORS)] for index in reversed(range(len(records)))]
    for record, color in zip(records, colors):  # one by one: torchvision draws black where masks of one call overlap
        mask = torch.from_numpy(coco_mask.decode(record["segmentation"])).bool()
        image = draw_segmentation_masks(image, mask, alpha=_OPACITY, colors=color)
    boxes = torch.tensor([record["bbox"] for record in records])
    boxes[:, 2:] += boxes[:, :2]  # x, y, width, height -> x1, y1, x2, y2
    size = max(10, min(image.shape[-2:]) // 30)
    return draw_bounding_boxes(
        image,
        boxes,
        [f"{names[record['category_id']]} {record['score']:.2f}" for record in records],
        colors=list(colors),
        width=max(1, size // 6),
        font=_font_file(),
        font_size=size,
        label_colors="white",
        fill_labels=True,
    )


@lru_cache(maxsize=1)
def _font_file() -> str:
    """torchvision needs a file for a font that has a size; matplotlib has one."""
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
