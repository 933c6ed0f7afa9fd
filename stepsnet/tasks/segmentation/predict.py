"""The classes of images: a colored overlay with a legend, and the segments in COCO's form."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_segmentation_masks

from ...config import SegmentationRecipe
from ...files import png_bytes
from ...models.upernet import UPerNet
from ..assets import read_classes
from ..images import open_image
from ..prediction import PredictInputs, Prediction, origin_of, read_files
from .task import inference_of

__all__ = ["color_of", "draw_segments", "encode_rle", "list_segments", "predict"]

_OPACITY = 0.55
_CLASSES_PER_LINE = 5
_GOLDEN_RATIO = 0.618034  # of the color circle: steps of this size never return to an earlier hue


@torch.no_grad()
def predict(run: Path, recipe: SegmentationRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write the classes of each image into ``inputs.out``: NAME.segments.png, an overlay, and NAME.segments.json.

    Returns:
        The content of each JSON file, with the name of the image file: the image, its segments in COCO's form, and
        the categories.

    Raises:
        UserError: a file is missing or is not an image, or something of somebody else's is where a result would be;
            then nothing is written.
    """
    files, outputs = inputs.require_files(run, recipe), inputs.outputs
    overlays, lists = (outputs.paths(inputs.places, f".segments.{kind}") for kind in ("png", "json"))
    model, device = inputs.model_of(run, recipe)
    classes, inference = read_classes(run), inference_of(recipe, cast(UPerNet, model))
    categories = [{"id": i, "name": name, "color": color_of(i)} for i, name in enumerate(classes)]
    predictions = []
    with outputs.reserved([*overlays, *lists] if inputs.writes else [], inputs.places):
        for file, path, listed, image in zip(files, overlays, lists, read_files(files, open_image)):
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
            predictions.append(Prediction(f"{file}: {', '.join(shares)} → {path}", {**origin_of(file), **found}))
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


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """A mask (H, W) as COCO's compressed RLE, in the form that JSON holds."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {**rle, "counts": rle["counts"].decode()}


def draw_segments(image: Tensor, labels: np.ndarray, segments: Sequence[dict[str, Any]]) -> Image.Image:
    """Draw the classes' colors over an image, with white lines where they meet, and a legend on the right.

    Args:
        image: (3, H, W) uint8.
        labels: (H, W), the class of each pixel.
        segments: of :func:`list_segments`.
    """
    masks = torch.from_numpy(np.stack([labels == segment["category_id"] for segment in segments]))
    colors = [color_of(segment["category_id"]) for segment in segments]
    mixed = draw_segmentation_masks(image, masks, alpha=_OPACITY, colors=colors)
    border = torch.zeros(labels.shape, dtype=torch.bool)
    border[:, 1:] |= torch.from_numpy(labels[:, 1:] != labels[:, :-1])
    border[1:] |= torch.from_numpy(labels[1:] != labels[:-1])
    mixed[:, border] = 255
    overlay = to_pil_image(mixed)
    entries = [(s["category_id"], s["category"], f"{100 * s['share']:.1f}%") for s in segments]
    legend = _legend(entries, overlay.height)
    canvas = Image.new("RGB", (overlay.width + legend.width, max(overlay.height, legend.height)), "white")
    canvas.paste(overlay, (0, 0))
    canvas.paste(legend, (overlay.width, 0))
    return canvas


def color_of(category: int) -> tuple[int, int, int]:
    """The color of a class, the same in every image; classes with neighboring numbers differ much in hue."""
    red, green, blue = colorsys.hsv_to_rgb(
        category * _GOLDEN_RATIO % 1, (0.85, 0.55, 1.0)[category % 3], (0.95, 0.8, 0.6)[category // 3 % 3]
    )
    return round(255 * red), round(255 * green), round(255 * blue)


def _legend(entries: Sequence[tuple[int, str, str]], height: int) -> Image.Image:
    """One line per class, with its color, name and share, in several columns where one is higher than the image."""
    size = min(max(height // 24, 12), 28)
    font, line, gap = ImageFont.load_default(size=size), round(1.5 * size), round(0.6 * size)
    rows = min(max(height // line, 4), len(entries))
    name_width = max(round(font.getlength(name)) for _, name, _ in entries)
    share_width = round(font.getlength("100.0%"))
    column = gap + size + gap + name_width + gap + share_width + gap
    columns = -(-len(entries) // rows)
    image = Image.new("RGB", (columns * column, rows * line + gap), "white")
    draw = ImageDraw.Draw(image)
    for number, (category, name, share) in enumerate(entries):
        left, top = number // rows * column + gap, number % rows * line + gap // 2
        draw.rectangle((left, top + 2, left + size, top + 2 + size), fill=color_of(category), outline="black")
        draw.text((left + size + gap, top), name, fill="black", font=font)
        right = left + size + gap + name_width + gap + share_width
        draw.text((right, top), share, fill="black", font=font, anchor="ra")
    return image
