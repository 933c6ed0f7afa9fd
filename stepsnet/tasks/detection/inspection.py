"""What a report shows of a detector: the objects that are there beside those that were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchvision.ops import box_iou
from torchvision.transforms.v2.functional import to_pil_image

from ...run_folder.inspection import Picture, Pictures, Section
from ..pictures import RULE, as_picture, best_median_worst, side_by_side
from .data import CocoSplit, corners_of
from .drawing import draw_objects
from .scores import class_names
from .validate import Record, encode_segmentation

__all__ = ["pictures_of", "quality"]

_MIN_SCORE, _MIN_IOU = 0.5, 0.5
_SIDE, _FONT_SIZE = 420, 13  # in pixels, for each of the two images in a picture

Found = list[dict[str, Any]]


def pictures_of(split: CocoSplit, found: dict[int, Found]) -> list[Section]:
    """Show the best, the median and the worst image.

    Args:
        found: COCO's result records for each image, by the image's index in ``split``.
    """
    shown = {index: [one for one in of_image if one["score"] >= _MIN_SCORE] for index, of_image in found.items()}
    scores = {
        index: quality(there, of_image)
        for index, of_image in shown.items()
        if (there := split.objects_of(split.images[index])) or of_image
    }
    if not scores:
        return []
    pictures = [
        _picture(split, index, shown[index], f"{rank}: {scores[index]:.2f}")
        for rank, index in best_median_worst(scores).items()
    ]
    about = (
        f"Left: the annotated objects. Right: the objects found with a score of at least {_MIN_SCORE}. These are "
        f"{RULE.format(count=len(scores))}, ranked by the number in front: the sum of the IoUs of matching objects and "
        f"boxes (of the same class, with an IoU of at least {_MIN_IOU}), divided by the mean of the number of objects "
        "and the number of boxes. 1 is perfect."
    )
    return [Pictures("Annotated and found objects", about, pictures, is_wide=True)]


def quality(there: Sequence[Record], found: Sequence[Record]) -> float:
    """The panoptic quality (Kirillov et al., 2019) of boxes: 1 if every object is found exactly, and nothing else."""
    free, total = list(range(len(there))), 0.0
    overlaps = box_iou(corners_of(found), corners_of(there))  # (found, there)
    for row in sorted(range(len(found)), key=lambda row: -found[row]["score"]):
        same = [column for column in free if there[column]["category_id"] == found[row]["category_id"]]
        best = max(same, key=lambda column: float(overlaps[row, column]), default=None)
        if best is not None and overlaps[row, best] >= _MIN_IOU:
            total += float(overlaps[row, best])
            free.remove(best)
    return 2 * total / max(len(there) + len(found), 1)


def _picture(split: CocoSplit, index: int, found: Found, title: str) -> Picture:
    record, names = split.images[index], class_names(split.categories)
    there, size = split.objects_of(record), (record["height"], record["width"])
    image = (split.read(record) * 255).round().byte()
    font_size = max(_FONT_SIZE, round(_FONT_SIZE * max(image.shape[-2:]) / _SIDE))
    annotated: Found = [{key: one[key] for key in ("category_id", "bbox")} for one in there]
    if split.has_masks:
        for one, annotation in zip(annotated, there):
            one["segmentation"] = encode_segmentation(annotation["segmentation"], *size)
    drawn = [to_pil_image(draw_objects(image, records, names, font_size)) for records in (annotated, found)]
    detail = f"{record['file_name']}: {len(there)} annotated, {len(found)} found"
    return as_picture(side_by_side(drawn, _SIDE), title, detail, side=3 * _SIDE)
