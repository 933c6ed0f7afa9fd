"""Cascade R-CNN (Cai and Vasconcelos, 2018): Cascade Mask R-CNN without its mask heads, for boxes alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from .cascade_mask_rcnn import create_heads
from .mask_rcnn import Detector, create_detector

__all__ = ["create"]


def create(backbone: str, *args: Any, **kwargs: Any) -> Detector:
    """Cascade R-CNN; the arguments are those of :func:`.mask_rcnn.create_detector`."""
    return create_detector(partial(create_heads, masks=False), backbone, *args, **kwargs)
