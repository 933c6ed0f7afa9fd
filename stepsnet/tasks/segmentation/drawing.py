"""The classes of an image's pixels, drawn over it in the colors of a legend."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_segmentation_masks

from .data import IGNORED

__all__ = ["color_of", "draw_labels", "draw_legend", "draw_segments"]

_OPACITY = 0.55
_GOLDEN_RATIO = 0.618034  # of the color circle: steps of this size never return to an earlier hue


def draw_segments(image: Tensor, labels: np.ndarray, segments: Sequence[dict[str, Any]]) -> Image.Image:
    """Draw the classes' colors over an image, and a legend with their shares on the right.

    Args:
        image: (3, H, W) uint8.
        labels: (H, W), the class of each pixel.
        segments: from :func:`list_segments`.
    """
    overlay = draw_labels(image, labels)
    legend = draw_legend(
        [(s["category_id"], s["category"], f"{100 * s['share']:.1f}%") for s in segments], overlay.height
    )
    canvas = Image.new("RGB", (overlay.width + legend.width, max(overlay.height, legend.height)), "white")
    canvas.paste(overlay, (0, 0))
    canvas.paste(legend, (overlay.width, 0))
    return canvas


def draw_labels(image: Tensor, labels: np.ndarray) -> Image.Image:
    """Draw the classes' colors over an image, with white lines where they meet; ignored pixels are left as they are.

    Args:
        image: (3, H, W) uint8.
        labels: (H, W), the class of each pixel.
    """
    categories = [int(category) for category in np.unique(labels) if category != IGNORED]
    mixed = image.clone()
    if categories:
        masks = torch.from_numpy(np.stack([labels == category for category in categories]))
        mixed = draw_segmentation_masks(image, masks, alpha=_OPACITY, colors=[color_of(one) for one in categories])
    border = torch.zeros(labels.shape, dtype=torch.bool)
    border[:, 1:] |= torch.from_numpy(labels[:, 1:] != labels[:, :-1])
    border[1:] |= torch.from_numpy(labels[1:] != labels[:-1])
    mixed[:, border] = 255
    return to_pil_image(mixed)


def color_of(category: int) -> tuple[int, int, int]:
    """The color of a class, the same in every image; classes with neighboring numbers differ much in hue."""
    red, green, blue = colorsys.hsv_to_rgb(
        category * _GOLDEN_RATIO % 1, (0.85, 0.55, 1.0)[category % 3], (0.95, 0.8, 0.6)[category // 3 % 3]
    )
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_legend(entries: Sequence[tuple[int, str, str]], height: int) -> Image.Image:
    """One line per class, with its color, name and share; in several columns if one is higher than the image."""
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
