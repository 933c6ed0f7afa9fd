"""CamVid: 367 images of streets in 11 classes, from random weights; a minute per epoch on one core.

`stepsnet compare camvid/tiny --data camvid:PATH`. Widths and depths are Steps-Swin-T's at a third of the width
(Table 14), images are halved to 240×180. There is no classifier of these widths to start from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..settings.config import ModelSpec
from .ade20k import ADE20K
from .table_rows import by_name

__all__ = ["RECIPES"]


def _upernet(**stages: Any) -> ModelSpec:
    """Steps-Swin with windows of 4×4, which 128 pixels fill in every stage; one step per stage is Swin."""
    return ModelSpec(
        "upernet",
        {
            "channels": 48,
            "auxiliary_channels": 32,
            "backbone": "steps_swin_tiny_patch4_window7_224",
            "backbone_args": {"window_size": 4, "img_size": 128, "drop_path_rate": 0.1, **stages},
        },
    )


TINY = dataclasses.replace(
    ADE20K,
    name="camvid/tiny",
    title="UPerNet on a narrow Steps-Swin, against Swin of similar compute",
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
    augment=dataclasses.replace(ADE20K.augment, scale_range=(0.75, 1.75)),
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

RECIPES = by_name(TINY)
