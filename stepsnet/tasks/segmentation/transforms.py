"""From an image and its labels to a model's input: the augmentation of training, and the size of evaluation.

These are torchvision's transforms and four that it does not have, with Swin's settings; recipes/ade20k.py has their
source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from ...settings.config import SegmentationAugment
from ..masks import resize_mask
from .data import IGNORED

__all__ = ["PhotometricDistortion", "fit_within", "training_transform"]

_MAX_CROPS = 10


def fit_within(size: tuple[int, int], scale: tuple[float, float]) -> tuple[int, int]:
    """Scale (H, W) by the largest factor that keeps its long and short sides within ``scale``."""
    factor = min(max(scale) / max(size), min(scale) / min(size))
    return max(round(size[0] * factor), 1), max(round(size[1] * factor), 1)


def training_transform(
    augment: SegmentationAugment,
    scale: tuple[int, int],
    crop_size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> v2.Transform:
    """The training transform of (image (3, H, W) uint8, labels (H, W) uint8), both tv_tensors.

    It returns the normalized image (3, crop_size, crop_size) and its labels (crop_size, crop_size). A smaller
    image is padded with the mean color, and its labels with :data:`~stepsnet.tasks.segmentation.data.IGNORED`.

    Args:
        scale: the largest long and short side in pixels, before the random factor.
        crop_size: the side of the crop in pixels.
    """
    return v2.Compose(
        [
            _RandomScale(scale, augment.scale_range),
            _RandomCrop(crop_size, augment.max_class_share),
            v2.RandomHorizontalFlip(augment.hflip),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            *([PhotometricDistortion()] if augment.photometric else []),
            v2.Normalize(list(mean), list(std)),
            _PadTo(crop_size),
        ]
    )


class _RandomScale(v2.Transform):
    """Resize to fit within ``scale`` times a factor drawn from ``scale_range``."""

    def __init__(self, scale: tuple[int, int], scale_range: tuple[float, float]):
        super().__init__()
        self.scale, self.scale_range = scale, scale_range

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        factor = torch.empty(1).uniform_(*self.scale_range).item()
        height, width = v2.query_size(flat_inputs)
        return {"size": fit_within((height, width), (self.scale[0] * factor, self.scale[1] * factor))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        size = list(params["size"])
        if isinstance(inpt, tv_tensors.Mask):
            return resize_mask(inpt, size)
        return F.resize(inpt, size, antialias=True)


class _RandomCrop(v2.Transform):
    """The first of ten random crops in which no class exceeds a share of the labelled pixels, or else the last."""

    def __init__(self, size: int, max_class_share: float):
        super().__init__()
        self.size, self.max_class_share = size, max_class_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        (labels,) = (inpt for inpt in flat_inputs if isinstance(inpt, tv_tensors.Mask))
        height, width = (min(self.size, side) for side in labels.shape)
        for _ in range(_MAX_CROPS):
            top, left = (int(torch.randint(full - part + 1, ())) for full, part in zip(labels.shape, (height, width)))
            counts = labels[top : top + height, left : left + width].flatten().bincount(minlength=IGNORED)[:IGNORED]
            if counts.sum() > 0 and counts.max() <= self.max_class_share * counts.sum():
                break
        return {"top": top, "left": left, "height": height, "width": width}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, **params)


class PhotometricDistortion(v2.Transform):
    """Change brightness, contrast, saturation and hue of an image with values in 0 … 1, each with probability 0.5.

    The changes are those of mmsegmentation's class of this name. torchvision's RandomPhotometricDistort changes much
    less: its brightness is a factor within an eighth of 1, and its contrast keeps the mean of the image.
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        order = ["brightness", "saturation", "hue"]
        order.insert(1 if torch.rand(()) < 0.5 else 3, "contrast")
        chosen = [name for name in order if torch.rand(()) < 0.5]
        return {"changes": [(name, torch.empty(()).uniform_(*_COLOR_RANGES[name]).item()) for name in chosen]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if isinstance(inpt, tv_tensors.Mask):
            return inpt
        image = inpt.as_subclass(Tensor)
        for name, amount in params["changes"]:
            image = _COLOR_CHANGES[name](image, amount)
        return tv_tensors.wrap(image, like=inpt)


def _add(image: Tensor, amount: float) -> Tensor:
    return (image + amount).clamp(0, 1)


def _scale_saturation(image: Tensor, factor: float) -> Tensor:
    """Scale the S of HSV, to at most 1. torchvision's adjust_saturation blends with the grey image, which changes V.

    With H and V kept, each channel's distance to V = max(r, g, b) is scaled by the same factor as S.
    """
    least, value = image.aminmax(dim=-3, keepdim=True)
    distance = value - least  # S is distance / value
    factors = torch.where(distance > 0, value / distance, 1).clamp(max=factor)
    return value - factors * (value - image)


_COLOR_RANGES = {
    "brightness": (-32 / 255, 32 / 255),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
    "hue": (-18 / 180, 18 / 180),  # of the color circle, which has 180 units in OpenCV
}
_COLOR_CHANGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": _add,
    "contrast": F.adjust_brightness,  # the image times the factor, clamped
    "saturation": _scale_saturation,
    "hue": F.adjust_hue,
}


class _PadTo(v2.Transform):
    """Pad on the right and at the bottom: normalized images with 0, which is the mean, and labels with IGNORED."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, self.size - width, self.size - height]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Tensor:
        return F.pad(inpt, params["padding"], fill=IGNORED if isinstance(inpt, tv_tensors.Mask) else 0)
