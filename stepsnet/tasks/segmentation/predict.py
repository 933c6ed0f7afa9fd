"""The classes of images: a colored overlay with a legend, and the segments in COCO's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torchvision.transforms.v2.functional import pil_to_tensor

from ...models.upernet import UPerNet
from ...settings.config import SegmentationRecipe
from ..class_names import read_classes
from ..images import open_image, png_bytes
from ..masks import encode_rle
from ..prediction import PredictInputs, Prediction, origin_of, read_again
from .drawing import color_of, draw_segments
from .task import inference_of

__all__ = ["list_segments", "predict"]

_CLASSES_PER_LINE = 5
_COMPARED_SHARE = 0.01  # of an image: a class that covers less is not compared between runs


@torch.no_grad()
def predict(run: Path, recipe: SegmentationRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write the classes of each image: NAME.segments.png, an overlay, and NAME.segments.json, the segments.

    Returns:
        The content of each JSON file, with the name of the image file: the image, its segments in COCO's form, and
        the categories.

    Raises:
        UserError: a file is missing or is not an image, or a result would replace something that is not ours;
            nothing is written then.
    """
    inputs.require_files(run, recipe)
    inputs, outputs = inputs.readable(open_image), inputs.outputs
    overlays, lists = (outputs.paths(inputs.places, f".segments.{kind}") for kind in ("png", "json"))
    model, device = inputs.model_of(run, recipe)
    classes, inference = read_classes(run), inference_of(recipe, cast(UPerNet, model))
    categories = [{"id": i, "name": name, "color": color_of(i)} for i, name in enumerate(classes)]
    predictions = []
    with outputs.reserved([*overlays, *lists] if inputs.writes else [], inputs.places):
        for file, path, listed, image in zip(inputs.files, overlays, lists, read_again(inputs.files, open_image)):
            pixels = pil_to_tensor(image)  # (3, H, W)
            likeliest = inference(model, pixels.to(device)).max(0)
            labels, probabilities = likeliest.indices.cpu().numpy(), likeliest.values.exp().cpu().numpy()
            segments = list_segments(labels, probabilities, classes)
            name = {"file_name": file.name} if isinstance(file, Path) else {}
            described = {**name, "height": image.height, "width": image.width}
            found = {"image": described, "segments": segments, "categories": categories}
            if inputs.writes:
                outputs.write(path, png_bytes(draw_segments(pixels, labels, segments)))
                outputs.write(listed, json.dumps(found) + "\n")
            shares = [f"{one['category']} {100 * one['share']:.1f}%" for one in segments[:_CLASSES_PER_LINE]]
            line = f"{file}: {', '.join(shares)} → {path}"
            answer = ", ".join(sorted(one["category"] for one in segments if one["share"] >= _COMPARED_SHARE))
            predictions.append(Prediction(line, {**origin_of(file), **found}, str(file), answer))
    return predictions


def list_segments(labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """One segment per class that is found, the largest first.

    Args:
        labels: (H, W), the class of each pixel.
        probabilities: (H, W), the probability of that class; a segment's score is their mean.

    Returns:
        For each segment its category, area in pixels, share of the image, score, box as [x, y, width, height] and
        compressed RLE.
    """
    found = []
    for category in np.unique(labels):
        mask = labels == category
        rle = encode_rle(mask)
        area = int(coco_mask.area(rle))
        found.append(
            {
                "category_id": int(category),
                "category": classes[category],
                "area": area,
                "share": round(area / mask.size, 6),
                "score": round(float(probabilities[mask].mean()), 4),
                "bbox": [int(value) for value in coco_mask.toBbox(rle)],
                "segmentation": rle,
            }
        )
    return sorted(found, key=lambda segment: -segment["area"])
