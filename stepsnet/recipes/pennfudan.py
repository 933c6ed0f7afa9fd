"""Penn-Fudan: pedestrians in 120 images, from random weights; half a minute per epoch on one core.

`stepsnet compare pennfudan/mask_rcnn --data coco:PATH`, a folder of `images/` and `instances_{train,val}.json`.
"""

from __future__ import annotations

import dataclasses

from ..settings.config import DetectionAugment, DetectionRecipe, ModelSpec
from .table_rows import by_name

__all__ = ["RECIPES"]

_HEADS = {
    "size": 160,
    "max_size": 320,
    "anchors": (16, 32, 64, 128, 256),
    "channels": 32,
    "hidden": 128,
    "samples": 64,
}
# Steps-Swin-T and Swin-T at a quarter of their width
_STEPS = {
    **_HEADS,
    "backbone": "steps_swin_tiny_patch4_window7_224",
    "backbone_args": {
        "widths": ((24,), (48,), (48, 68, 96), (48, 68, 96, 136)),
        "depths": ((2,), (2,), (6, 3, 3), (4, 2, 2, 2)),
        "drop_path_rate": 0.0,
    },
}
_SWIN = {
    **_HEADS,
    "backbone": "swin_tiny_patch4_window7_224",
    "backbone_args": {"embed_dim": 24, "depths": (2, 2, 6, 2), "num_heads": (1, 2, 4, 8), "drop_path_rate": 0.0},
}

MASK_RCNN = DetectionRecipe(
    name="pennfudan/mask_rcnn",
    title="Mask R-CNN on a narrow Steps-Swin, against the same on Swin",
    data="coco:data/pennfudan",
    model=ModelSpec("mask_rcnn", _STEPS),
    baseline=ModelSpec("mask_rcnn", _SWIN),
    augment=DetectionAugment(sizes=(128, 144, 160, 176, 192), max_size=320, flip=0.5),
    epochs=30,
    batch_size=4,
    lr=1e-3,
    warmup_epochs=1,
    log_interval=10,
)
CASCADE = dataclasses.replace(
    MASK_RCNN,
    name="pennfudan/cascade",
    title="Cascade Mask R-CNN, everything else as pennfudan/mask_rcnn",
    model=ModelSpec("cascade_mask_rcnn", _STEPS),
    baseline=ModelSpec("cascade_mask_rcnn", _SWIN),
)
FASTER = dataclasses.replace(
    MASK_RCNN,
    name="pennfudan/faster_rcnn",
    title="Faster R-CNN: boxes alone, everything else as pennfudan/mask_rcnn",
    model=ModelSpec("faster_rcnn", _STEPS),
    baseline=ModelSpec("faster_rcnn", _SWIN),
)

RECIPES = by_name(MASK_RCNN, CASCADE, FASTER)
