"""Faster R-CNN (Ren et al., 2015) with FPN: Mask R-CNN without its mask head, for data that have boxes alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from .mask_rcnn import Detector, create_detector, create_heads

__all__ = ["create"]


def create(backbone: str, *args: Any, **kwargs: Any) -> Detector:
    """Faster R-CNN; the arguments are those of :func:`.mask_rcnn.create_detector`."""
    return create_detector(partial(create_heads, masks=False), backbone, *args, **kwargs)
