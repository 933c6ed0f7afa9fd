"""timm's training transform of a classifier's pictures, for every Pillow that the package allows."""

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
    """A Pillow picture of any size -> (C, H, W), augmented and normalised.

    Raises:
        UserError: ``auto_augment`` is no policy of timm's.
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


def posterize(picture: Image.Image, bits_to_keep: int, **kwargs: Any) -> Image.Image:
    """timm's, which keeps so many of the highest bits of a channel, with 0 bits as well.

    timm draws 4 to 0 bits, and fewer still where a magnitude may exceed 10. Pillow up to 12 took 0 bits and made
    all values 0; from 13 on it raises a ValueError. A black picture stays what it was: the published numbers
    were trained with it, and a recipe gives the same batches with every Pillow.
    """
    if bits_to_keep < 1:
        return Image.new(picture.mode, picture.size)
    return auto_augment.posterize(picture, bits_to_keep, **kwargs)


def _operations(transform: Any) -> Iterator[AugmentOp]:
    """The operations of a policy: RandAugment and AugMix hold a list of them, AutoAugment a list of lists."""
    for part in transform.transforms:
        yield from getattr(part, "ops", ())
        for operations in getattr(part, "policy", ()):
            yield from operations
