"""CIFAR-10 at small scale: 10,000 of its training images, 16 tokens, minutes per epoch on one core.

`stepsnet compare cifar10/shallow --data cifar10:PATH`, or `folder:PATH` for images in folders;
`stepsnet sweep 'cifar10/steps_*' 'cifar10/fixed_width_*' --data …` trains all depths.
docs/evidence/cifar10-depth.md has the comparison of tuned and converged networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..settings.config import Augment, ClassificationRecipe, ModelSpec
from .digits import depth_recipes, one_width, three_steps
from .table_rows import by_name

__all__ = ["RECIPES"]
_TOKENS = {"patch_size": 8}  # 16 tokens per image of CIFAR-10


def _swin(in_stage_3: Sequence[Sequence[int]], in_stage_4: Sequence[Sequence[int]]) -> ModelSpec:
    """Swin-T or Steps-Swin-T with an eighth of all widths and windows of 4×4; (widths, depths, heads) of two stages."""
    stages = (((12,), (2,), (1,)), ((24,), (2,), (2,)), in_stage_3, in_stage_4)
    widths, depths, heads = zip(*stages)
    images = {"patch_size": 2, "window_size": 4, "drop_path_rate": 0.0}
    return ModelSpec(
        "steps_swin_tiny_patch4_window7_224", {**images, "widths": widths, "depths": depths, "num_heads": heads}
    )


SHALLOW = ClassificationRecipe(
    name="cifar10/shallow",
    title="24 blocks in three steps, against 24 of one width at the same compute",
    data="cifar10:data/cifar10",
    model=three_steps(24, **_TOKENS),
    baseline=one_width(24, **_TOKENS),
    img_size="data",
    crop_pct=1.0,
    augment=Augment(scale=(0.6, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5),
    train_samples=10_000,
    epochs=8,
    batch_size=64,
    lr=1e-3,
    warmup_epochs=1,
    stream_epochs=4,
)
DEEP = dataclasses.replace(
    SHALLOW,
    name="cifar10/deep",
    title="96 blocks in three steps, against 96 of one width at the same compute",
    model=three_steps(96, **_TOKENS),
    baseline=one_width(96, **_TOKENS),
)
# Table 11's last two rows, with an eighth of their widths
SWIN = dataclasses.replace(
    SHALLOW,
    name="cifar10/swin",
    title="a Swin of 26 blocks, with its two last stages in steps, against Swin's 12 at the same compute",
    model=_swin(((24, 34, 48), (6, 3, 3), (2, 2, 4)), ((24, 34, 48, 68), (4, 2, 2, 2), (2, 2, 4, 4))),
    baseline=_swin(((48,), (6,), (4,)), ((96,), (2,), (8,))),
)

RECIPES = by_name(
    SHALLOW,
    DEEP,
    SWIN,
    *depth_recipes(DEEP, **_TOKENS),
)
