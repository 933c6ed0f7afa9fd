"""CamVid in small: 367 pictures of streets, 11 classes, on one core in minutes."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import ModelSpec, SegmentationAugment, SegmentationRecipe
from .ade20k import ade20k

__all__ = ["RECIPES"]

_HEADS = {"num_classes": 11, "channels": 48, "auxiliary_channels": 32}


def _upernet(**stages: Any) -> ModelSpec:
    """Steps-Swin with windows of 4×4, which 128 pixels fill in every stage; one step a stage is Swin."""
    arguments = {"window_size": 4, "img_size": 128, "drop_path_rate": 0.1, **stages}
    return ModelSpec(
        "upernet", {**_HEADS, "backbone": "steps_swin_tiny_patch4_window7_224", "backbone_args": arguments}
    )


def camvid_tiny() -> SegmentationRecipe:
    """UPerNet on CamVid with a narrow Steps-Swin, against Swin of like compute: a minute an epoch on one core.

    `stepsnet compare camvid/tiny --data camvid:PATH`. Widths and depths are Steps-Swin-T's at a third of the width
    (Table 14), pictures are halved to 240×180. From random weights: there is no classifier of these to begin with.
    """
    return dataclasses.replace(
        ade20k(),
        name="camvid/tiny",
        data="camvid:data/camvid",
        model=_upernet(
            widths=((32,), (64,), (64, 90, 128), (64, 90, 128, 180)),
            num_heads=((2,), (4,), (4, 6, 8), (4, 6, 8, 12)),
            depths=((2,), (2,), (6, 3, 3), (4, 2, 2, 2)),
        ),
        baseline=_upernet(
            widths=((32,), (64,), (128,), (256,)),
            num_heads=((2,), (4,), (8,), (16,)),
            depths=((2,), (2,), (6,), (2,)),
        ),
        scale=(240, 180),
        crop_size=128,
        augment=SegmentationAugment(scale_range=(0.75, 1.75)),
        epochs=10,
        epoch_updates=None,
        batch_size=8,
        lr=1e-3,
        warmup_epochs=1,
        warmup_lr=1e-6,
        clip_grad=5.0,
        amp_dtype="float32",
        workers=0,
        stream_epochs=5,
        log_interval=10,
    )


RECIPES = {"camvid/tiny": camvid_tiny}
