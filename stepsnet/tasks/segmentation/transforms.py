"""From an image and its labels to a model's input: the augmentation of training, and the size of evaluation.

These are torchvision's transforms and three that it does not have, with Swin's settings (facts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ...config import SegmentationAugment
from .data import IGNORED

__all__ = ["fit_within", "training_transform"]

_MAX_CROPS = 10


def fit_within(size: tuple[int, int], scale: tuple[float, float]) -> tuple[int, int]:
    """(H, W) resized by the largest factor for which its long and short sides stay within ``scale``."""
    factor = min(max(scale) / max(size), min(scale) / min(size))
    return max(round(size[0] * factor), 1), max(round(size[1] * factor), 1)


def training_transform(
    augment: SegmentationAugment,
    scale: tuple[int, int],
    crop_size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> v2.Transform:
    """A transform of (image (3, H, W) uint8, labels (H, W) uint8), both tv_tensors.

    Its results are the normalized image (3, crop_size, crop_size) and its labels (crop_size, crop_size). A smaller
    image is padded with the mean color, and its labels with :data:`~stepsnet.tasks.segmentation.data.IGNORED`.

    Args:
        scale: the largest long and short side in pixels, before the random factor.
        crop_size: side of the crop in pixels.
    """
    return v2.Compose(
        [
            _RandomScale(scale, augment.scale_range),
            _RandomCrop(crop_size, augment.max_class_share),
            v2.RandomHorizontalFlip(augment.hflip),
            *([_PhotometricDistortion(hue=(-0.1, 0.1))] if augment.photometric else []),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
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
            # F.resize takes torch's mode "nearest" for masks, which shifts them by up to half a pixel
            labels = inpt.as_subclass(Tensor)[None]
            resized = F.resize_image(labels, size, interpolation=InterpolationMode.NEAREST_EXACT)
            return tv_tensors.wrap(resized[0], like=inpt)
        return F.resize(inpt, size, antialias=True)


class _RandomCrop(v2.Transform):
    """The first of ten random crops in which no class has more than a share of the labelled pixels, or the last."""

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


class _PhotometricDistortion(v2.RandomPhotometricDistort):
    """Brightness, contrast, saturation and hue. torchvision also permutes the channels, and Swin does not."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class _PadTo(v2.Transform):
    """Pad at the right and at the bottom: normalized images with 0, the mean, and labels with IGNORED."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, self.size - width, self.size - height]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Tensor:
        return F.pad(inpt, params["padding"], fill=IGNORED if isinstance(inpt, tv_tensors.Mask) else 0)
