"""What a segmentation run says of a picture: a coloured overlay with a legend, and its segments in COCO's form."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask
from torch import nn

from ..errors import UserError
from ..files import picture_bytes, write_atomically
from ..models.upernet import UPerNet
from ..recipes.recipe import SegmentationRecipe, read_recipe
from .image_data import UNREADABLE, open_picture, unreadable
from .segmentation import classes_of, inference_of

__all__ = ["colour_of", "draw", "draw_segments", "list_segments"]

_OPACITY = 0.55
_GOLDEN = 0.618034  # steps of this share of the colour circle never come back to where they were


@torch.no_grad()
def draw(
    model: nn.Module, device: torch.device, folder: Path, files: Sequence[Path], out: Path, least: float = 0.0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Write for each picture NAME.segments.png, an overlay, and NAME.segments.json.

    Args:
        folder: the run's, which knows the classes and how whole pictures are tested.
        least: of objects; here every pixel has a class.

    Returns:
        What the JSON of each holds (the image, its segments in COCO's form, the categories), and a line for each.

    Raises:
        UserError: a file that is missing or no picture, or two of one name, before anything is written.
    """
    classes, recipe = classes_of(folder), read_recipe(folder / "config.yaml")
    assert isinstance(recipe, SegmentationRecipe) and isinstance(model, UPerNet)
    inference = inference_of(recipe, model)
    for file in files:
        _open(file)
        if same := [other for other in files if other.stem == file.stem and other != file]:
            raise UserError(f"predict: got {file} and {same[0]}, expected names that differ: both go into {out}")
    records, lines = [], []
    for file in files:
        picture = _open(file)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # (3, H, W)
        likeliest = inference(model, pixels.to(device)).max(0)
        labels, probabilities = likeliest.indices.cpu().numpy(), likeliest.values.exp().cpu().numpy()
        segments = list_segments(labels, probabilities, classes)
        record = {
            "image": {"file_name": str(file), "height": picture.height, "width": picture.width},
            "segments": segments,
            "categories": [{"id": i, "name": name, "color": colour_of(i)} for i, name in enumerate(classes)],
        }
        place = out / f"{file.stem}.segments.png"
        write_atomically(place, picture_bytes(draw_segments(picture, labels, segments, classes)))
        write_atomically(place.with_suffix(".json"), json.dumps(record) + "\n")
        said = ", ".join(f"{one['category']} {100 * one['share']:.1f}%" for one in segments[:5])
        lines.append(f"{file}: {said}{', …' if len(segments) > 5 else ''} → {place}")
        records.append(record)
    return records, lines


def _open(file: Path) -> Image.Image:
    try:
        return open_picture(file, "RGB")
    except UNREADABLE as error:
        raise unreadable(file, error) from None


def list_segments(labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A segment a class that is found, the largest first: category, area in pixels, share of the picture, RLE.

    Args:
        labels: (H, W), a class a pixel.
        probabilities: (H, W), that of the pixel's class; a segment's score is its mean.
    """
    found = []
    for category in np.unique(labels):
        mask = labels == category
        encoded = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
        area = int(coco_mask.area(encoded))
        found.append(
            {
                "category_id": int(category),
                "category": classes[category],
                "area": area,
                "share": round(area / mask.size, 6),
                "score": round(float(probabilities[mask].mean()), 4),
                "bbox": coco_mask.toBbox(encoded).tolist(),
                "segmentation": {**encoded, "counts": encoded["counts"].decode()},
            }
        )
    return sorted(found, key=lambda segment: -segment["area"])


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
