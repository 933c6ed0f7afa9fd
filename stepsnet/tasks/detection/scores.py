"""COCO's AP by pycocotools, over all classes and for each, and the records that it is computed from."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from ..masks import encode_rle
from .data import CocoSplit

__all__ = ["ByClass", "average_precision", "class_names", "found_objects", "objects_by_class"]

# COCO's summary: the mean over IoU 0.5 to 0.95, at 0.5 and 0.75 alone, and by the objects' size
_SUMMARY = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")

ByClass = dict[str, dict[str, float | None]]


def found_objects(objects: dict[str, Tensor], categories: Sequence[int]) -> list[dict[str, Any]]:
    """A detector's output for one image as COCO's result records, without the image's id.

    A box is [x, y, width, height] in pixels, and a mask is RLE.

    Args:
        objects: "boxes" (N, 4) as x1, y1, x2, y2 in pixels, "labels" (N), "scores" (N), and, if the detector has
            masks, "masks" (N, 1, H, W) of probabilities.
        categories: the category ids, starting with that of label 1.
    """
    records = []
    rows = (objects[key].float().cpu().tolist() for key in ("boxes", "scores"))
    for (x1, y1, x2, y2), score, label in zip(*rows, objects["labels"].tolist()):
        box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "score": score}
        records.append({"category_id": categories[label - 1], **box})
    if "masks" in objects and records:
        masks = (objects["masks"][:, 0] > 0.5).byte().cpu().numpy()  # (N, H, W)
        for record, mask in zip(records, masks):
            record["segmentation"] = encode_rle(mask)
    return records


def average_precision(split: CocoSplit, found: list[dict[str, Any]]) -> tuple[dict[str, float], ByClass]:
    """COCO's AP in percent: over IoU 0.5 to 0.95, at 0.5 and 0.75, and by the objects' size.

    Returns:
        The means over all classes by key, such as ``box_ap``, leaving out sizes of which there are no objects; and
        ``box_ap`` and ``mask_ap`` of each class, None if the split has no objects of it.
    """
    scores: dict[str, float] = {}
    by_class: ByClass = {}
    names = class_names(split.categories)
    kinds = [("bbox", "box", found)]
    if split.has_masks:
        # pycocotools takes a record's area from its box, if it has one
        of_mask = [{key: value for key, value in record.items() if key != "bbox"} for record in found]
        kinds.append(("segm", "mask", of_mask))
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its steps
        truth = COCO()
        truth.dataset = split.content()
        truth.createIndex()
        for kind, name, records in kinds:
            judge = COCOeval(truth, truth.loadRes(records) if records else COCO(), kind)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
            for key, value in zip(_SUMMARY, judge.stats.tolist()):
                if value >= 0:  # -1: there are no such objects
                    scores[f"{name}_{key}"] = round(100 * value, 4)
            precision = judge.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), objects of every size
            by_class[f"{name}_ap"] = {
                names[category]: _mean_of_known(precision[:, :, index])
                for index, category in enumerate(judge.params.catIds)
            }
    return scores, by_class


def objects_by_class(split: CocoSplit) -> dict[str, int]:
    """The number of objects of each class, without crowds."""
    counts = Counter(record["category_id"] for image in split.images for record in split.objects_of(image))
    return {name: counts[category] for category, name in class_names(split.categories).items()}


def class_names(categories: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The name of each category id; the id is appended if several categories share the name."""
    names = {category["id"]: category["name"] for category in categories}
    with_ids = {number: f"{name} ({number})" for number, name in names.items()}
    times = Counter(names.values())
    own = {number: name if times[name] == 1 else with_ids[number] for number, name in names.items()}
    return own if len(set(own.values())) == len(own) else with_ids


def _mean_of_known(precision: np.ndarray) -> float | None:
    known = precision[precision > -1]
    return round(100 * float(known.mean()), 4) if known.size else None
