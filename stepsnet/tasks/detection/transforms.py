"""A detector's training augmentation, on torchvision's v2 kernels.

torchvision's own random transforms draw from torch's generator and have no crop whose sides are drawn from a range of
pixels. Everything random here is drawn from Python's generator, in an order that seeded recipes rely on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from ...settings.config import DetectionAugment
from ..masks import resize_mask
from .validate import MIN_SIDE

__all__ = ["Target", "augmented", "clamped", "resized_size"]

Target = dict[str, Tensor]
_GEOMETRIC = ("image", "boxes", "masks")  # masks only if there are any


def augmented(image: Tensor, target: Target, augment: DetectionAugment) -> tuple[Tensor, Target]:
    """Flip with some probability, resize and crop with another, and then resize to one of the sizes.

    Args:
        image: (3, H, W).
        target: "boxes" (N, 4) as x1, y1, x2, y2 in pixels, "labels" (N), and, if there are masks, "masks" (N, H, W).
        augment: the settings, with ``sizes`` and ``max_size`` given.

    Returns:
        The image and its target at the new size, without objects that a crop left out.
    """
    assert augment.sizes is not None and augment.max_size is not None
    boxes = _boxes(target["boxes"], image.shape[-2:])
    sample = {**target, "image": tv_tensors.Image(image), "boxes": boxes}
    if "masks" in target:
        sample["masks"] = tv_tensors.Mask(target["masks"])
    if random.random() < augment.flip:
        sample = _apply(F.horizontal_flip, sample)
    if random.random() < augment.crop:
        sample = _resize(sample, random.choice(augment.crop_sizes), augment.max_size)
        sample = _random_crop(sample, augment.crop_range)
    sample = _resize(sample, random.choice(augment.sizes), augment.max_size)
    plain = {key: value.as_subclass(Tensor) for key, value in sample.items()}
    return plain.pop("image"), plain


def clamped(boxes: Tensor, height: int, width: int) -> Tensor:
    """Boxes (N, 4) as x1, y1, x2, y2, cut to the image."""
    return F.clamp_bounding_boxes(_boxes(boxes, (height, width))).as_subclass(Tensor)


def resized_size(height: int, width: int, size: int, max_size: int) -> tuple[int, int]:
    """The height and width with the shorter side at ``size``, or the longer at ``max_size`` if that is smaller."""
    scale = min(size / min(height, width), max_size / max(height, width))
    return max(1, int(height * scale)), max(1, int(width * scale))


def _boxes(boxes: Tensor, size: Sequence[int]) -> tv_tensors.BoundingBoxes:
    """Boxes (N, 4) as x1, y1, x2, y2 in an image of ``size``, its height and width."""
    return tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=tuple(size))


def _apply(kernel: Any, sample: Target, **arguments: Any) -> Target:
    return sample | {key: kernel(sample[key], **arguments) for key in _GEOMETRIC if key in sample}


def _resize(sample: Target, size: int, max_size: int) -> Target:
    """Resize as torchvision's detectors do in evaluation: bilinear without antialiasing; masks by the nearest pixel."""
    height, width = sample["image"].shape[-2:]
    new = list(resized_size(height, width, size, max_size))
    sample = sample | {key: F.resize(sample[key], new, antialias=False) for key in ("image", "boxes")}
    if "masks" in sample:
        sample["masks"] = resize_mask(sample["masks"], new)
    return sample


def _random_crop(sample: Target, sides: tuple[int, int]) -> Target:
    """Crop a window whose height and width are drawn from the range ``sides``; objects outside it are left out."""
    height, width = sample["image"].shape[-2:]
    high, wide = (random.randint(min(side, sides[0]), min(side, sides[1])) for side in (height, width))
    top, left = random.randint(0, height - high), random.randint(0, width - wide)
    sample = _apply(F.crop, sample, top=top, left=left, height=high, width=wide)
    boxes = sample["boxes"].as_subclass(Tensor)
    kept = (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE).all(1)  # SanitizeBoundingBoxes accepts no minimum below one pixel
    inside = {"boxes": tv_tensors.wrap(boxes[kept], like=sample["boxes"]), "labels": sample["labels"][kept]}
    if "masks" in sample:
        inside["masks"] = tv_tensors.Mask(sample["masks"][kept])
    return sample | inside
