"""What the tasks can be told; a recipe holds it, and nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Augment", "DetectionAugment", "SegmentationAugment"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """timm's augmentation, by timm's names. The defaults are the paper's: Swin's (facts.md)."""

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.4
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    re_prob: float = 0.25  # random erasing
    re_mode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: float = 0.8
    cutmix: float = 1.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    aug_repeats: int = 1  # copies of a sample in an epoch, each augmented in its own way


@dataclass(frozen=True, kw_only=True)
class DetectionAugment:
    """Sizes and crops of a detector's training images. The defaults are those of Swin's detectors (facts.md)."""

    sizes: tuple[int, ...] = tuple(range(480, 801, 32))  # of the shorter side, one drawn
    max_size: int = 1333  # of the longer side
    flip: float = 0.5
    crop: float = 0.5  # share of the samples that are first resized, and cropped, before the sizes above
    crop_sizes: tuple[int, ...] = (400, 500, 600)  # of the shorter side before the crop
    crop_range: tuple[int, int] = (384, 600)  # of the crop's height and of its width, in pixels


@dataclass(frozen=True, kw_only=True)
class SegmentationAugment:
    """What a picture and its labels undergo in training. The defaults are Swin's for ADE20K (facts.md)."""

    scale_range: tuple[float, float] = (0.5, 2.0)  # of the recipe's scale
    max_class_share: float = 0.75  # of a crop's labelled pixels, where ten tries find such a crop
    hflip: float = 0.5
    photometric: bool = True  # brightness, contrast, saturation and hue
