"""COCO data: images and their objects as samples, each a function of the seed, the epoch and its index.

A data set is ``coco:PATH``, in COCO's own layout (``annotations/instances_train2017.json`` and ``train2017/``) or
a flat one (``instances_train.json`` and ``images/``), each with a val split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor
from torch.utils.data import Dataset

from ...config import DetectionAugment
from ...engine.randomness import data_order, seed_sample
from ...errors import UserError, nearest
from ..images import UnreadableImage, open_image
from .transforms import Target, augmented, clamped
from .validate import Record, check_split, encode_segmentation, read_annotations

__all__ = ["CocoData", "CocoSplit", "DetectionSamples", "grouped_order", "load_coco", "read_pixels"]

WithoutObjects = Literal["refuse", "leave_out", "train"]

_JSON = ("annotations/instances_{}2017.json", "annotations/instances_{}.json", "instances_{}.json")
_FOLDERS = ("{}2017", "images/{}", "{}", "images")
_GROUP_SIZE = 4  # images of one shape in a row, at most


@dataclass(frozen=True)
class CocoSplit:
    file: Path
    folder: Path  # of the images
    categories: tuple[Record, ...]  # by id; label 1 is the first category's
    images: tuple[Record, ...]
    annotations: dict[int, list[Record]]  # of each image, by the image's id
    left_out: tuple[str, ...]  # what is not used, and why

    @property
    def labels(self) -> dict[int, int]:
        """The label of each category id."""
        return {category["id"]: label for label, category in enumerate(self.categories, 1)}

    def content(self) -> dict[str, Any]:
        """The split in COCO's form for its evaluation, without what is left out."""
        annotations = [
            {"area": record["bbox"][2] * record["bbox"][3], "iscrowd": 0, **record}
            for image in self.images
            for record in self.annotations.get(image["id"], [])
        ]
        return {"images": list(self.images), "annotations": annotations, "categories": list(self.categories)}


@dataclass(frozen=True)
class CocoData:
    classes: tuple[str, ...]
    train: DetectionSamples
    val: DetectionSamples


class DetectionSamples(Dataset):
    """Images with their objects: sample (epoch, index) is a function of these numbers and the seed.

    A sample is the image (3, H, W) with values in 0 … 1, its target ("boxes" (N, 4) as x1, y1, x2, y2 in pixels,
    "labels" (N) from 1 on, "masks" (N, H, W) of 0 and 1), and the reason why it cannot be decoded, "" where it can.
    Crowd regions are not in the target.
    """

    def __init__(self, split: CocoSplit, augment: DetectionAugment | None, seed: int = 0):
        self.split, self.augment, self.seed = split, augment, seed
        self.labels = split.labels

    def __len__(self) -> int:
        return len(self.split.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Target, str]:
        epoch, index = key
        record = self.split.images[index]
        try:
            image = read_pixels(self.split.folder / record["file_name"], (record["width"], record["height"]))
        except UnreadableImage as error:
            return torch.zeros(3, 1, 1), {}, f"{self.split.folder / record['file_name']}: {error}"
        target = self.target(index)
        if self.augment:
            seed_sample(self.seed, epoch, index)
            image, target = augmented(image, target, self.augment)
        return image, target, ""

    def target(self, index: int) -> Target:
        """The objects of an image, at the size of the image."""
        record = self.split.images[index]
        height, width = record["height"], record["width"]
        objects = [a for a in self.split.annotations.get(record["id"], []) if not a.get("iscrowd", 0)]
        boxes = torch.tensor([a["bbox"] for a in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]  # x, y, width, height -> x1, y1, x2, y2
        if objects:
            encoded = [encode_segmentation(a["segmentation"], height, width) for a in objects]
            masks = torch.from_numpy(np.ascontiguousarray(coco_mask.decode(encoded).transpose(2, 0, 1)))
        else:
            masks = torch.zeros(0, height, width, dtype=torch.uint8)
        labels = torch.tensor([self.labels[a["category_id"]] for a in objects], dtype=torch.int64)
        return {"boxes": clamped(boxes, height, width), "labels": labels, "masks": masks}


def load_coco(
    data: str,
    augment: DetectionAugment | None = None,
    seed: int = 0,
    *,
    max_invalid: int = 0,
    without_objects: WithoutObjects = "refuse",
    training: bool = True,
) -> CocoData:
    """Open a data set and check all of it.

    Args:
        data: ``coco:PATH``, or a path alone.
        augment: of the training split; None leaves images as they are.
        max_invalid: annotations per split that may be left out, for a box without area or outside its image.
        without_objects: what to do with training images that have no objects besides crowds.
        training: False opens the validation split only, and leaves the training split without images.

    Raises:
        UserError: a mistake in the data, with its file and record.
    """
    kind, colon, path = data.partition(":")
    root = Path(path if colon and kind == "coco" else data)
    if colon and kind != "coco" and not root.exists():
        raise UserError(f"data: got {data!r}, expected coco:PATH{nearest(kind, ['coco'])}")
    if not root.is_dir():
        raise UserError(f"data: {root} is not a folder, expected --data coco:PATH, with images and their JSON")
    train = _open_split(root, "train", max_invalid) if training else None
    val = _open_split(root, "val", max_invalid)
    if train is None:
        train = replace(val, images=(), annotations={}, left_out=())
    elif [dict(category) for category in train.categories] != [dict(category) for category in val.categories]:
        raise UserError(f"data: {val.file} has other categories than {train.file}, expected the same")
    else:
        train = _with_objects(train, without_objects)
    classes = tuple(category["name"] for category in train.categories)
    return CocoData(classes, DetectionSamples(train, augment, seed), DetectionSamples(val, None, seed))


def read_pixels(file: Path | Image.Image, stored_size: tuple[int, int] | None = None) -> Tensor:
    """An image of any mode -> (3, H, W) with values in 0 … 1. Takes and raises the same as ``open_image``."""
    return torch.from_numpy(np.array(open_image(file, stored_size=stored_size))).permute(2, 0, 1).float() / 255


def grouped_order(samples: DetectionSamples, epoch: int, batch_size: int) -> list[int]:
    """The indices of an epoch: a permutation that is a function of (seed, epoch), in groups of upright or wide images.

    The size of a group is the largest divisor of ``batch_size`` up to four, so that in a forward pass of so many
    images none is padded from one shape to the other. The groups are in random order; images that do not fill a
    group come last.
    """
    together = max(size for size in range(1, _GROUP_SIZE + 1) if batch_size % size == 0)
    order = data_order(samples.seed, epoch, len(samples)).tolist()
    upright = {index for index in order if _is_upright(samples.split.images[index])}
    groups, rest = [], []
    for shape in ([i for i in order if i in upright], [i for i in order if i not in upright]):
        full = len(shape) - len(shape) % together
        groups += [shape[first : first + together] for first in range(0, full, together)]
        rest += shape[full:]
    shuffled = [groups[index] for index in data_order(samples.seed + 1, epoch, len(groups))]
    return [index for group in shuffled for index in group] + rest


def _is_upright(image: Record) -> bool:
    return image["height"] > image["width"]


def _open_split(root: Path, name: str, max_invalid: int) -> CocoSplit:
    file = _first_of(root, _JSON, name, "file of instances")
    folder = _first_of(root, _FOLDERS, name, "folder of images")
    content = read_annotations(file)
    invalid = check_split(file, folder, content)
    if len(invalid) > max_invalid:
        more = f" ({len(invalid)} such annotations, expected at most max_invalid={max_invalid})"
        raise UserError(f"data: {next(iter(invalid.values()))}{more}")
    annotations: dict[int, list[Record]] = defaultdict(list)
    for annotation in content["annotations"]:
        if annotation["id"] not in invalid:
            annotations[annotation["image_id"]].append(annotation)
    categories = sorted(content["categories"], key=lambda category: category["id"])
    left_out = tuple(f"left out an annotation, {reason}" for reason in invalid.values())
    return CocoSplit(file, folder, tuple(categories), tuple(content["images"]), dict(annotations), left_out)


def _first_of(root: Path, patterns: Sequence[str], name: str, what: str) -> Path:
    paths = [root / pattern.format(name) for pattern in patterns]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        expected = " or ".join(str(path.relative_to(root)) for path in paths)
        raise UserError(f"data: {root} has no {what} of {name}, expected {expected}")
    return found


def _with_objects(split: CocoSplit, without: WithoutObjects) -> CocoSplit:
    """A training split, with images that have no objects treated as ``without`` says."""

    def has_objects(image: Record) -> bool:
        return any(not annotation.get("iscrowd", 0) for annotation in split.annotations.get(image["id"], []))

    empty = [image for image in split.images if not has_objects(image)]
    if not empty or without == "train":
        return split
    first = f"such as {empty[0]['id']} ({empty[0]['file_name']})"
    if without == "refuse":
        raise UserError(
            f"data: {split.file}: {len(empty)} images have no objects to train on, {first}, "
            "expected objects in each, or without_objects=leave_out or train"
        )
    kept = tuple(image for image in split.images if has_objects(image))
    if not kept:
        raise UserError(f"data: {split.file} has no image with objects to train on, expected at least one")
    notice = f"left out {len(empty)} training images without objects of {split.file}, {first}"
    return replace(split, images=kept, left_out=(*split.left_out, notice))
