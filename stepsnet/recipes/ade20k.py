"""ADE20K: the rows of Table 3, and the settings that small segmentation recipes derive from.

`stepsnet train ade20k/steps_swin_tiny --data ade20k:PATH backbone=RUN`, where RUN is a run of an imagenet/… recipe or
its weights. Not yet trained by us at this scale.
"""

from __future__ import annotations

from typing import Any

from ..settings.config import ModelSpec, SegmentationAugment, SegmentationRecipe
from .table_rows import by_name, recipe_of_row

__all__ = ["ADE20K", "RECIPES"]

_UPDATES = 160_000
_UPDATES_PER_EPOCH = 16_000  # between evaluations

# Swin's settings (arXiv 2103.14030, A2.3), which the paper refers to: 160,000 updates of 16 crops of 512×512, AdamW at
# 6e-5 with weight decay 0.01, 1,500 updates of warmup and then down to 0 in a straight line. Stochastic depth is 0.3,
# as in the configurations that Swin published; A2.3 says 0.2. Its mIoU of 44.5 is that of the whole image at one scale.
ADE20K = SegmentationRecipe(
    name="ade20k",
    model=ModelSpec("upernet"),
    data="ade20k:ade20k",
    scale=(2048, 512),
    crop_size=512,
    augment=SegmentationAugment(scale_range=(0.5, 2.0), max_class_share=0.75, hflip=0.5, photometric=True),
    epochs=_UPDATES // _UPDATES_PER_EPOCH,
    epoch_updates=_UPDATES_PER_EPOCH,
    batch_size=16,
    opt="adamw",
    lr=6e-5,
    weight_decay=0.01,
    warmup_epochs=1500 / _UPDATES_PER_EPOCH,
    warmup_lr=6e-11,
    min_lr=0.0,
    sched="poly",
    poly_power=1.0,
    clip_grad=None,
    amp_dtype="bfloat16",
    workers=8,
)
_ARGS: dict[str, Any] = {"backbone_args": {"drop_path_rate": 0.3}}

RECIPES = by_name(
    recipe_of_row(ADE20K, "ade20k/swin_tiny", "3", "Swin-T UPerNet", **_ARGS),
    recipe_of_row(ADE20K, "ade20k/steps_swin_tiny", "3", "Steps-Swin-T UPerNet", baseline="Swin-T UPerNet", **_ARGS),
)
