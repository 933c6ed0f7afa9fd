"""timm's training transform for classification, the same with each version of Pillow that the package supports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import AugmentOp

from ...config import Augment
from ...errors import UserError

if TYPE_CHECKING:
    from .data import InputSpec

__all__ = ["augmenting_transform", "posterize"]


def augmenting_transform(spec: InputSpec, augment: Augment) -> Any:
    """A transform of a Pillow image of any size to (C, H, W), augmented and normalized.

    Raises:
        UserError: ``auto_augment`` is not a policy of timm's.
    """
    try:
        transform = create_transform(
            spec.input_size,
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter,
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

    timm draws 4 to 0 bits, and fewer where a magnitude may exceed 10. Pillow up to version 12 accepts 0 bits and sets
    all values to 0; from version 13 on it raises a ValueError. Here the image becomes black in both: published
    numbers were trained with this, and a recipe gives the same batches with each version of Pillow.
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
