"""The augmentation settings of each task that reads images.

As in config.py, which has all other settings, each field declares its type, bounds and meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..errors import UserError
from .field_types import STRICT, Factor, Share, Side

__all__ = ["Augment", "DetectionAugment", "SegmentationAugment"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    """timm's augmentation, under timm's names. What is not named is off; the paper's is in recipes/imagenet.py."""

    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = Field(
        default=(1.0, 1.0),
        description="range of the share of the image that a crop covers; 1, 1: the largest square in its middle",
    )
    ratio: tuple[Factor, Factor] = Field(
        default=(1.0, 1.0), description="range of a crop's aspect ratio, width over height"
    )
    hflip: Share = Field(default=0.0, description="probability of a horizontal flip")
    color_jitter: float = Field(default=0.0, ge=0, le=10, description="strength; not used with auto_augment")
    auto_augment: str | None = Field(default=None, description="one of timm's policies, such as rand-m9-mstd0.5-inc1")
    re_prob: Share = Field(default=0.0, description="probability of random erasing")
    re_mode: Literal["const", "rand", "pixel"] = Field(default="pixel", description="what erased parts are filled with")
    mixup: float = Field(default=0.0, ge=0, le=1e3, description="alpha; 0: no Mixup")
    cutmix: float = Field(default=0.0, ge=0, le=1e3, description="alpha; 0: no CutMix")
    mixup_prob: Share = Field(default=1.0, description="probability that a batch gets Mixup or CutMix")
    mixup_switch_prob: Share = Field(default=0.5, description="probability of CutMix instead of Mixup, if both are on")
    aug_repeats: int = Field(
        default=1, ge=1, le=1024, description="copies of a sample per epoch, each augmented in its own way"
    )

    def __post_init__(self) -> None:
        _check_range("augment.scale", self.scale)
        _check_range("augment.ratio", self.ratio)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DetectionAugment:
    """Sizes and crops of a detector's training images. What is not named is off; Swin's are in recipes/coco.py."""

    sizes: Annotated[tuple[Side, ...], Field(min_length=1)] | None = Field(
        default=None, description="lengths of the shorter side, one drawn per image; null: as in evaluation"
    )
    max_size: Side | None = Field(default=None, description="largest length of the longer side; null: as in evaluation")
    flip: Share = Field(default=0.0, description="probability of a horizontal flip")
    crop: Share = Field(
        default=0.0, description="probability of a resize to one of crop_sizes and a crop, before the resize to sizes"
    )
    crop_sizes: tuple[Side, ...] = Field(
        default=(400, 500, 600),
        min_length=1,
        description="lengths of the shorter side before a crop, one drawn per image",
    )
    crop_range: tuple[Side, Side] = Field(default=(384, 600), description="range of a crop's height, and of its width")

    def __post_init__(self) -> None:
        _check_range("augment.crop_range", self.crop_range)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationAugment:
    """What is done to crops of an image and its labels. What is not named is off; Swin's is in recipes/ade20k.py."""

    scale_range: tuple[Factor, Factor] = Field(
        default=(1.0, 1.0), description="range of a random factor of the recipe's scale"
    )
    max_class_share: Share = Field(
        default=1.0,
        description="largest share of one class in a crop's labelled pixels; if ten crops exceed it, the last is taken",
    )
    hflip: Share = Field(default=0.0, description="probability of a horizontal flip")
    photometric: bool = Field(default=False, description="random changes of brightness, contrast, saturation and hue")

    def __post_init__(self) -> None:
        _check_range("augment.scale_range", self.scale_range)


def _check_range(name: str, bounds: tuple[float, float]) -> None:
    if bounds[0] > bounds[1]:
        raise UserError(f"{name}: got {bounds[0]}, {bounds[1]}, expected the smaller one first")
