"""Objects drawn on an image: masks, boxes, categories and scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ...output.colors import OKABE_ITO
from .data import corners_of

__all__ = ["draw_objects"]

_COLORS = OKABE_ITO[:6]  # without black
_OPACITY = 0.45  # of a mask


def draw_objects(
    image: Tensor, records: Sequence[dict[str, Any]], names: dict[int, str], font_size: int | None = None
) -> Tensor:
    """Draw the box and category of each object, with its mask and score if it has them, the highest score on top.

    Args:
        image: (3, H, W) uint8.
        records: COCO's result records, or annotations whose masks are RLE.
        names: the name of each category id.
        font_size: in pixels; None: according to the size of the image.
    """
    if not records:
        return image
    records = sorted(records, key=lambda record: record.get("score", 1.0))
    colors = [_COLORS[index % len(_COLORS)] for index in reversed(range(len(records)))]
    for record, color in zip(records, colors):  # one by one: torchvision draws black where masks of one call overlap
        if "segmentation" in record:
            mask = torch.from_numpy(coco_mask.decode(record["segmentation"])).bool()
            image = draw_segmentation_masks(image, mask, alpha=_OPACITY, colors=color)
    size = font_size or max(10, min(image.shape[-2:]) // 30)
    return draw_bounding_boxes(
        image,
        corners_of(records),
        [_label(record, names) for record in records],
        colors=list(colors),
        width=max(1, size // 6),
        font=_font_file(),
        font_size=size,
        label_colors="white",
        fill_labels=True,
    )


def _label(record: dict[str, Any], names: dict[int, str]) -> str:
    score = f" {record['score']:.2f}" if "score" in record else ""
    return names[record["category_id"]] + score


@lru_cache(maxsize=1)
def _font_file() -> str:
    """A font file that comes with matplotlib: torchvision needs one to draw text in a given size."""
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
