"""COCO data: pictures and their objects as samples that know nothing of what was drawn before them.

A data set is ``coco:PATH``, in COCO's own layout (``annotations/instances_train2017.json`` and ``train2017/``) or
a flat one (``instances_train.json`` and ``images/``), each with a val split.
"""

from __future__ import annotations

import random
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
from torch.nn import functional as F
from torch.utils.data import Dataset

from ...config import DetectionAugment
from ...engine.randomness import data_order, seed_sample
from ...errors import UserError, nearest
from ..classification.data import UNREADABLE
from .check import LEAST_SIDE, Record, check_split, encode_segmentation, read_annotations

__all__ = ["CocoData", "CocoSplit", "DetectionSamples", "grouped_order", "load_coco", "open_image", "resized_size"]

Target = dict[str, Tensor]
WithoutObjects = Literal["refuse", "leave_out", "train"]

_JSON = ("annotations/instances_{}2017.json", "annotations/instances_{}.json", "instances_{}.json")
_PICTURES = ("{}2017", "images/{}", "{}", "images")
_TOGETHER = 4  # images of one shape in a row


@dataclass(frozen=True)
class CocoSplit:
    file: Path
    folder: Path  # of the pictures
    categories: tuple[Record, ...]  # by id; label 1 is the first one's
    images: tuple[Record, ...]
    annotations: dict[int, list[Record]]  # of each image, by its id
    left_out: tuple[str, ...]  # what is passed over, and why

    @property
    def labels(self) -> dict[int, int]:
        """Label of each category id."""
        return {category["id"]: label for label, category in enumerate(self.categories, 1)}

    def content(self) -> dict[str, Any]:
        """As COCO's evaluation reads it: what is left out is not in it."""
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
    """Images with their objects: sample (epoch, index) is a function of these and the seed.

    A sample is the image (3, H, W) in 0 … 1, its target ("boxes" (N, 4) as x1, y1, x2, y2 in pixels, "labels" (N),
    "masks" (N, H, W) of 0 and 1), and the reason why it cannot be read, "" where it can. Crowd regions are no
    objects to be trained on.
    """

    def __init__(self, split: CocoSplit, augment: DetectionAugment | None, seed: int = 0):
        self.split, self.augment, self.seed = split, augment, seed
        self.labels = split.labels

    def __len__(self) -> int:
        return len(self.split.images)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Target, str]:
        epoch, index = place
        record = self.split.images[index]
        try:
            image = open_image(self.split.folder / record["file_name"])
        except UNREADABLE as error:
            return torch.zeros(3, 1, 1), {}, f"{self.split.folder / record['file_name']}: {error}"
        target = self.target(index)
        if self.augment:
            seed_sample(self.seed, epoch, index)
            image, target = _augmented(image, target, self.augment)
        return image, target, ""

    def target(self, index: int) -> Target:
        """An image's objects at its own size."""
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
        return {"boxes": _clipped(boxes, height, width), "labels": labels, "masks": masks}


def load_coco(
    data: str,
    augment: DetectionAugment | None = None,
    seed: int = 0,
    *,
    max_invalid: int = 0,
    without_objects: WithoutObjects = "refuse",
    training: bool = True,
) -> CocoData:
    """A data set, looked at as a whole before it is given out.

    Args:
        training: False opens the validation split alone, and the training split has no images.
        max_invalid: annotations of a split that may be left out, for a box without area or outside its image.
        without_objects: what to do with training images that have none but crowds.

    Raises:
        UserError: a mistake in the data, with its file and record.
    """
    kind, colon, place = data.partition(":")
    root = Path(place if colon and kind == "coco" else data)
    if colon and kind != "coco" and not root.exists():
        raise UserError(f"data: got {data!r}, expected coco:PATH{nearest(kind, ['coco'])}")
    if not root.is_dir():
        raise UserError(f"data: {root} is no folder; --data coco:PATH says where the pictures and their JSON are")
    train = _open_split(root, "train", max_invalid) if training else None
    val = _open_split(root, "val", max_invalid)
    if train is None:
        train = replace(val, images=(), annotations={}, left_out=())
    elif [dict(category) for category in train.categories] != [dict(category) for category in val.categories]:
        raise UserError(f"data: {val.file} has other categories than {train.file}")
    else:
        train = _with_objects(train, without_objects)
    classes = tuple(category["name"] for category in train.categories)
    return CocoData(classes, DetectionSamples(train, augment, seed), DetectionSamples(val, None, seed))


def open_image(path: Path) -> Tensor:
    """A picture of any mode -> (3, H, W) in 0 … 1; raises what Pillow raises."""
    with Image.open(path) as picture:
        pixels = np.array(picture.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def grouped_order(samples: DetectionSamples, epoch: int, batch_size: int) -> list[int]:
    """The indices of an epoch: a permutation of (seed, epoch) in which images lie together that are upright, or wide.

    They come in groups of the largest divisor of ``batch_size`` up to four, so that a forward pass of so many
    need not pad one to the other's shape. The groups are in random order; what fills none comes last.
    """
    together = max(size for size in range(1, _TOGETHER + 1) if batch_size % size == 0)
    order = data_order(samples.seed, epoch, len(samples)).tolist()
    upright = {index for index in order if _is_upright(samples.split.images[index])}
    groups, rest = [], []
    for shape in ([i for i in order if i in upright], [i for i in order if i not in upright]):
        whole = len(shape) - len(shape) % together
        groups += [shape[first : first + together] for first in range(0, whole, together)]
        rest += shape[whole:]
    shuffled = [groups[index] for index in data_order(samples.seed + 1, epoch, len(groups))]
    return [index for group in shuffled for index in group] + rest


def resized_size(height: int, width: int, size: int, max_size: int) -> tuple[int, int]:
    """Height and width with the shorter side at ``size``, or the longer one at ``max_size`` where it would be more."""
    scale = min(size / min(height, width), max_size / max(height, width))
    return max(1, int(height * scale)), max(1, int(width * scale))


def _is_upright(image: Record) -> bool:
    return image["height"] > image["width"]


def _open_split(root: Path, name: str, max_invalid: int) -> CocoSplit:
    file = _first_of(root, _JSON, name, "file of instances")
    folder = _first_of(root, _PICTURES, name, "folder of pictures")
    content = read_annotations(file)
    invalid = check_split(file, folder, content)
    if len(invalid) > max_invalid:
        more = f" ({len(invalid)} such annotations, max_invalid={max_invalid} may be left out)"
        raise UserError(f"data: {next(iter(invalid.values()))}{more}")
    annotations: dict[int, list[Record]] = defaultdict(list)
    for annotation in content["annotations"]:
        if annotation["id"] not in invalid:
            annotations[annotation["image_id"]].append(annotation)
    categories = sorted(content["categories"], key=lambda category: category["id"])
    left_out = tuple(f"left out an annotation, {reason}" for reason in invalid.values())
    return CocoSplit(file, folder, tuple(categories), tuple(content["images"]), dict(annotations), left_out)


def _first_of(root: Path, patterns: Sequence[str], name: str, what: str) -> Path:
    places = [root / pattern.format(name) for pattern in patterns]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        expected = " or ".join(str(place.relative_to(root)) for place in places)
        raise UserError(f"data: {root} has no {what} of {name}, expected {expected}")
    return found


def _with_objects(split: CocoSplit, without: WithoutObjects) -> CocoSplit:
    """A training split by what is to be done with images that have no objects."""

    def has_objects(image: Record) -> bool:
        return any(not annotation.get("iscrowd", 0) for annotation in split.annotations.get(image["id"], []))

    empty = [image for image in split.images if not has_objects(image)]
    if not empty or without == "train":
        return split
    first = f"such as {empty[0]['id']} ({empty[0]['file_name']})"
    if without == "refuse":
        raise UserError(
            f"data: {split.file}: {len(empty)} images have no objects to train on, {first}; "
            "without_objects=leave_out or train says what to do with them"
        )
    kept = tuple(image for image in split.images if has_objects(image))
    if not kept:
        raise UserError(f"data: {split.file} has no image with objects to train on")
    told = f"left out {len(empty)} training images without objects of {split.file}, {first}"
    return replace(split, images=kept, left_out=(*split.left_out, told))


def _augmented(image: Tensor, target: Target, augment: DetectionAugment) -> tuple[Tensor, Target]:
    """Flip, and resize to one of the sizes, with some chance after another size and a crop."""
    if random.random() < augment.flip:
        image, target = _flipped(image, target)
    if random.random() < augment.crop:
        image, target = _resized(image, target, random.choice(augment.crop_sizes), augment.max_size)
        image, target = _cropped(image, target, augment.crop_range)
    return _resized(image, target, random.choice(augment.sizes), augment.max_size)


def _flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - x2, y1, width - x1, y2], 1)
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


def _resized(image: Tensor, target: Target, size: int, max_size: int) -> tuple[Tensor, Target]:
    """As torchvision's detectors do in evaluation: bilinear, and the nearest pixel of masks."""
    height, width = image.shape[-2:]
    new = resized_size(height, width, size, max_size)
    if new == (height, width):
        return image, target
    image = F.interpolate(image[None], new, mode="bilinear", align_corners=False)[0]
    boxes = target["boxes"] * torch.tensor([new[1] / width, new[0] / height] * 2)
    masks = target["masks"]  # of which there may be none, after a crop
    masks = F.interpolate(masks[None], new, mode="nearest-exact")[0] if len(masks) else masks.new_zeros(0, *new)
    return image, {**target, "boxes": boxes, "masks": masks}


def _cropped(image: Tensor, target: Target, sides: tuple[int, int]) -> tuple[Tensor, Target]:
    """A window whose height and width are drawn from ``sides``; objects that leave it are no longer there."""
    height, width = image.shape[-2:]
    high, wide = (random.randint(min(side, sides[0]), min(side, sides[1])) for side in (height, width))
    top, left = random.randint(0, height - high), random.randint(0, width - wide)
    boxes = _clipped(target["boxes"] - torch.tensor([left, top] * 2), high, wide)
    masks = target["masks"][:, top : top + high, left : left + wide]
    kept = (boxes[:, 2:] - boxes[:, :2] >= LEAST_SIDE).all(1)
    cut = {"boxes": boxes[kept], "labels": target["labels"][kept], "masks": masks[kept]}
    return image[:, top : top + high, left : left + wide], cut


def _clipped(boxes: Tensor, height: int, width: int) -> Tensor:
    return torch.stack(
        [boxes[:, 0].clamp(0, width), boxes[:, 1].clamp(0, height), boxes[:, 2].clamp(0, width),
         boxes[:, 3].clamp(0, height)], 1
    )  # fmt: skip
