"""Pictures for reports: which images of a split are shown, and how they are kept small."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image

from ..run_folder.inspection import Picture

__all__ = ["RULE", "as_picture", "best_median_worst", "side_by_side", "spread_over"]

RULE = "the best, the median and the worst of {count} images that are spread evenly over the evaluated split"
_GAP = 6  # pixels between images that stand side by side
_SMALL = 64  # pixels; pictures with sides up to this are kept without loss


def spread_over(images: int, most: int = 60) -> list[int]:
    """At most ``most`` indices, evenly spread over ``range(images)``."""
    count = min(images, most)
    return [number * images // count for number in range(count)]


def best_median_worst(scores: Mapping[int, float]) -> dict[str, int]:
    """The images with the highest, the median and the lowest score, each image once.

    Args:
        scores: the score of each image, by its index; at least one.
    """
    ranked = sorted(scores, key=lambda index: (-scores[index], index))
    chosen: dict[str, int] = {}
    for name, index in (("best", ranked[0]), ("median", ranked[len(ranked) // 2]), ("worst", ranked[-1])):
        if index not in chosen.values():
            chosen[name] = index
    return chosen


def as_picture(image: Image.Image, title: str, detail: str = "", side: int = 192) -> Picture:
    """An image for a report: at most ``side`` pixels wide and high, as a JPEG, or as a PNG if it is tiny."""
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    is_small, content = max(image.size) <= _SMALL, io.BytesIO()
    image.save(content, "PNG") if is_small else image.save(content, "JPEG", quality=85)
    return Picture(content.getvalue(), "image/png" if is_small else "image/jpeg", title, detail)


def side_by_side(images: Sequence[Image.Image], side: int) -> Image.Image:
    """Images, each at most ``side`` pixels wide and high, from left to right on white."""
    for image in images:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    canvas, left = Image.new("RGB", (width, max(image.height for image in images)), "white"), 0
    for image in images:
        canvas.paste(image, (left, 0))
        left += image.width + _GAP
    return canvas
