"""timm's training transform for classification, the same with every supported version of Pillow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.transforms import MaybeToTensor, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor, functional

from ...errors import UserError
from ...settings.config import Augment
from ..images import mode_of

__all__ = ["InputSpec", "Transform", "augmenting_transform", "before_normalization", "normalized", "posterize"]

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class InputSpec:
    """How an image becomes an input: timm's data config of a model."""

    input_size: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"  # or squash, which distorts, or border, which pads

    @property
    def mode(self) -> str:
        """The mode that Pillow decodes images to."""
        mode = mode_of(self.input_size[0])
        assert mode is not None  # input_spec accepts no other number of channels
        return mode

    def training(self, augment: Augment | None) -> Transform:
        """timm's training transform, or that of evaluation if there is no augmentation."""
        if augment is None:
            return self.evaluation()
        return augmenting_transform(self, augment)

    def evaluation(self) -> Transform:
        """timm's resize, crop or padding, and normalization."""
        transform: Any = create_transform(
            self.input_size,
            is_training=False,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
        )
        for part in transform.transforms:
            if isinstance(part, ResizeKeepRatio):
                part.get_params = _kept_ratio
        return transform


def before_normalization(transform: Transform) -> tuple[Callable[[Any], Image.Image], Normalize] | None:
    """Split a timm transform in two: Pillow image -> 8-bit image, and the normalization of that image as a tensor.

    Normalizing a whole batch takes a fraction of the time of its images one by one. None if more follows, such as
    random erasing, or if the transform is not timm's.
    """
    parts: Any = getattr(transform, "transforms", ())
    if len(parts) < 2 or not isinstance(parts[-2], ToTensor) or not isinstance(parts[-1], Normalize):
        return None
    return Compose(parts[:-2]), parts[-1]


def normalized(images: Sequence[Image.Image], normalize: Normalize) -> Tensor:
    """Images of one size -> (B, C, H, W): bit for bit what ``ToTensor`` and ``normalize`` make of each."""
    if any(getattr(image, "mode", None) not in ("L", "RGB") for image in images):  # a source's own, with other values
        to_tensor = MaybeToTensor()
        return torch.stack([normalize(to_tensor(image)) for image in images])
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    pixels = pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels.unsqueeze(1)  # (B, C, H, W)
    inputs = pixels.to(torch.get_default_dtype(), memory_format=torch.contiguous_format).div_(255)
    return functional.normalize(inputs, normalize.mean, normalize.std, inplace=True)


def _kept_ratio(*given: Any) -> list[int]:
    """timm's height and width, but one pixel for a side that it rounds to none: a picture may be a line."""
    return [max(1, side) for side in ResizeKeepRatio.get_params(*given)]


def augmenting_transform(spec: InputSpec, augment: Augment) -> Any:
    """A transform of a Pillow image of any size to (C, H, W), augmented and normalized.

    Raises:
        UserError: ``auto_augment`` is not one of timm's policies.
    """
    try:
        transform = create_transform(
            spec.input_size,
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter or None,  # 0 would take a tenth of the time and do nothing
            auto_augment=augment.auto_augment,
            interpolation=spec.interpolation,
            mean=spec.mean,
            std=spec.std,
            re_prob=augment.re_prob,
            re_mode=augment.re_mode,
        )
    except (AssertionError, KeyError, ValueError):
        if augment.auto_augment is None:
            raise
        raise UserError(
            f"augment.auto_augment: got {augment.auto_augment!r}, expected a policy of timm's such as "
            "rand-m9-mstd0.5-inc1, augmix-m3-w3 or original"
        ) from None
    for operation in _operations(transform):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = posterize
    return transform


def posterize(image: Image.Image, bits_to_keep: int, **kwargs: Any) -> Image.Image:
    """timm's operation, which keeps the highest bits of each channel, extended to 0 bits.

    timm draws 4 to 0 bits, and fewer if a magnitude may exceed 10. Pillow up to version 12 accepts 0 bits and sets
    all values to 0; from version 13 on it raises a ValueError. Here the image becomes black in both: published
    numbers were trained with this, and a recipe gives the same batches with every version of Pillow.
    """
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep, **kwargs)


def _operations(transform: Any) -> Iterator[AugmentOp]:
    """The operations of a policy: RandAugment and AugMix have a list of them, AutoAugment a list of lists."""
    for part in transform.transforms:
        yield from getattr(part, "ops", ())
        for operations in getattr(part, "policy", ()):
            yield from operations
