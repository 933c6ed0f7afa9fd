"""COCO: the twelve rows of Table 2. Not yet trained by us at this scale.

`stepsnet train coco/mask_rcnn_steps_swin_tiny --data coco:PATH backbone=RUN`, where RUN is a run of an imagenet/…
recipe or its weights; a Steps model with its baseline by `stepsnet compare`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..settings.config import DetectionAugment, DetectionRecipe, ModelSpec
from .table_rows import by_name, recipe_of_row

__all__ = ["COCO", "RECIPES"]

_IMAGES = 117_266  # of train2017 that have objects

# Swin's settings (arXiv 2103.14030, A2.2), which the paper refers to: 16 images per batch, AdamW 1e-4, weight decay
# 0.05, the rate down tenfold twice. The 1,000 updates of warmup are those of MMDetection 2's own configurations of
# Swin, configs/swin/mask_rcnn_swin-t-p4-w7_fpn_1x_coco.py: lr_config = dict(warmup_iters=1000, step=[8, 11]). The
# backbone is meant to start from ImageNet.
COCO = DetectionRecipe(
    name="coco",
    model=ModelSpec("mask_rcnn"),
    data="coco:coco",
    augment=DetectionAugment(sizes=tuple(range(480, 801, 32)), max_size=1333, flip=0.5, crop=0.5),
    epochs=12,
    batch_size=16,
    opt="adamw",
    lr=1e-4,
    weight_decay=0.05,
    sched="multistep",
    milestones=(8.0, 11.0),
    decay_rate=0.1,
    warmup_epochs=1000 * 16 / _IMAGES,
    warmup_lr=1e-7,
    clip_grad=None,
    amp_dtype="bfloat16",
    workers=4,
    max_invalid=100,  # train2017 has a few boxes without area
    without_objects="leave_out",
)
_3X = dataclasses.replace(COCO, epochs=36, milestones=(27.0, 33.0))


def _pair(
    base: DetectionRecipe, table: str, detector: str, backbone: str, size: str, drop_path_rate: float
) -> list[DetectionRecipe]:
    """The rows of a baseline and its StepsNet. Stochastic depth: Swin published T in both settings, S and B only for
    3x; for S and B at 1x it is ours."""
    model = "mask_rcnn" if detector == "Mask R-CNN" else "cascade_mask_rcnn"
    args: dict[str, Any] = {"backbone_args": {"drop_path_rate": drop_path_rate}}
    row = f"{backbone} {detector}"
    return [
        recipe_of_row(base, f"coco/{model}_swin_{size}", table, row, **args),
        recipe_of_row(base, f"coco/{model}_steps_swin_{size}", table, f"Steps-{row}", baseline=row, **args),
    ]


RECIPES = by_name(
    *_pair(COCO, "2a", "Mask R-CNN", "Swin-T", "tiny", drop_path_rate=0.1),
    *_pair(COCO, "2a", "Mask R-CNN", "Swin-S", "small", drop_path_rate=0.2),
    *_pair(COCO, "2a", "Mask R-CNN", "Swin-B", "base", drop_path_rate=0.3),
    *_pair(_3X, "2b", "Cascade Mask R-CNN", "Swin-T", "tiny", drop_path_rate=0.2),
    *_pair(_3X, "2b", "Cascade Mask R-CNN", "Swin-S", "small", drop_path_rate=0.2),
    *_pair(_3X, "2b", "Cascade Mask R-CNN", "Swin-B", "base", drop_path_rate=0.3),
)
