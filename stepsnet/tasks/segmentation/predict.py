"""What a segmentation run says of a picture: a coloured overlay with a legend, and its segments in COCO's form."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ...config import SegmentationRecipe
from ...errors import UserError
from ...files import picture_bytes, write_atomically
from ...models.build import build_model
from ...models.upernet import UPerNet
from ..classification.data import open_picture, read_to_predict
from ..prediction import PredictInputs, Prediction, load_trained
from .task import classes_of, inference_of

__all__ = ["colour_of", "draw_segments", "encode_rle", "list_segments", "predict"]

_OPACITY = 0.55
_SAID = 5  # classes a line
_GOLDEN = 0.618034  # steps of this share of the colour circle never come back to where they were


@torch.no_grad()
def predict(run: Path, recipe: SegmentationRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Write each image's classes into ``inputs.out``: NAME.segments.png, an overlay, and NAME.segments.json.

    Returns:
        What each JSON holds, with the file: the image, its segments in COCO's form, and the categories.

    Raises:
        UserError: a file that is missing or not an image, or two of one name; nothing is written then.
    """
    files, out = inputs.require_files(run, recipe), inputs.out
    by_stem: dict[str, Path] = {}
    for file in files:
        if (other := by_stem.setdefault(file.stem, file)) != file:
            raise UserError(f"predict: got {other} and {file}, expected names that differ: both go into {out}")
    model, device = load_trained(run, recipe, build_model(recipe.model))
    classes, inference = classes_of(run), inference_of(recipe, cast(UPerNet, model))
    categories = [{"id": i, "name": name, "color": colour_of(i)} for i, name in enumerate(classes)]
    predictions = []
    for file, picture in zip(files, read_to_predict(files, partial(open_picture, mode="RGB"))):
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # (3, H, W)
        likeliest = inference(model, pixels.to(device)).max(0)
        labels, probabilities = likeliest.indices.cpu().numpy(), likeliest.values.exp().cpu().numpy()
        segments = list_segments(labels, probabilities, classes)
        image = {"file_name": file.name, "height": picture.height, "width": picture.width}
        found = {"image": image, "segments": segments, "categories": categories}
        path = out / f"{file.stem}.segments.png"
        write_atomically(path, picture_bytes(draw_segments(picture, labels, segments, classes)))
        write_atomically(out / f"{file.stem}.segments.json", json.dumps(found) + "\n")
        said = ", ".join(f"{one['category']} {100 * one['share']:.1f}%" for one in segments[:_SAID])
        predictions.append(Prediction(f"{file}: {said} → {path}", {"file": str(file), **found}))
    return predictions


def list_segments(labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A segment a class that is found, the largest first: category, area in pixels, share of the picture, RLE.

    Args:
        labels: (H, W), a class a pixel.
        probabilities: (H, W), that of the pixel's class; a segment's score is its mean.
    """
    found = []
    for category in np.unique(labels):
        mask = labels == category
        rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
        top, left = int(rows[0]), int(columns[0])
        area = int(mask.sum())
        found.append(
            {
                "category_id": int(category),
                "category": classes[category],
                "area": area,
                "share": round(area / mask.size, 6),
                "score": round(float(probabilities[mask].mean()), 4),
                "bbox": [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1],
                "segmentation": encode_rle(mask),
            }
        )
    return sorted(found, key=lambda segment: -segment["area"])


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """COCO's run lengths: column by column, of zeros and ones in turn, from zeros on."""
    flat = mask.astype(bool).ravel(order="F")
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate(([0], ends, [flat.size]))).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def draw_segments(
    picture: Image.Image, labels: np.ndarray, segments: Sequence[dict[str, Any]], classes: Sequence[str]
) -> Image.Image:
    """The picture under its classes' colours, with lines where they meet, and a legend on the right."""
    colours = np.asarray([colour_of(category) for category in range(len(classes))], dtype=np.float64)
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    mixed = (1 - _OPACITY) * pixels + _OPACITY * colours[labels]
    border = np.zeros(labels.shape, dtype=bool)
    border[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    border[1:] |= labels[1:] != labels[:-1]
    mixed[border] = 255
    overlay = Image.fromarray(mixed.round().astype(np.uint8))
    legend = _legend([(s["category_id"], s["category"], f"{100 * s['share']:.1f}%") for s in segments], picture.height)
    canvas = Image.new("RGB", (overlay.width + legend.width, max(overlay.height, legend.height)), "white")
    canvas.paste(overlay, (0, 0))
    canvas.paste(legend, (overlay.width, 0))
    return canvas


def colour_of(category: int) -> tuple[int, int, int]:
    """Of a class, in every picture the same; neighbours in number are far apart in hue."""
    red, green, blue = colorsys.hsv_to_rgb(
        category * _GOLDEN % 1, (0.85, 0.55, 1.0)[category % 3], (0.95, 0.8, 0.6)[category // 3 % 3]
    )
    return round(255 * red), round(255 * green), round(255 * blue)


def _legend(entries: Sequence[tuple[int, str, str]], height: int) -> Image.Image:
    """A line a class: its colour, name and share; in several columns where one is higher than the picture."""
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
        draw.rectangle((left, top + 2, left + size, top + 2 + size), fill=colour_of(category), outline="black")
        draw.text((left + size + gap, top), name, fill="black", font=font)
        right = left + size + gap + name_width + gap + share_width
        draw.text((right, top), share, fill="black", font=font, anchor="ra")
    return image
