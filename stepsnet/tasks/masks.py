"""What the dense tasks share about masks: how they are resized, and how JSON holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

__all__ = ["encode_rle", "resize_mask"]


def resize_mask(mask: tv_tensors.Mask, size: Sequence[int]) -> tv_tensors.Mask:
    """Resize masks or labels (…, H, W) to the nearest pixel by its center; ``size`` is the new height and width."""
    # F.resize uses torch's mode "nearest" for masks, which shifts them by up to half a pixel
    plain = mask.as_subclass(Tensor)[None]
    resized = F.resize_image(plain, list(size), interpolation=InterpolationMode.NEAREST_EXACT)
    return tv_tensors.wrap(resized[0], like=mask)


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask (H, W) as COCO's compressed RLE, in a form that JSON can hold."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {**rle, "counts": rle["counts"].decode()}
