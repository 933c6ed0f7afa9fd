"""ADE20K: the rows of Table 3, and the settings that small segmentation recipes derive from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..config import ModelSpec, SegmentationRecipe
from ..paper.rows import model_of, printed_rows

__all__ = ["RECIPES", "ade20k"]

_STOCHASTIC_DEPTH = 0.3
_UPDATES = 160_000
_UPDATES_BETWEEN_EVALUATIONS = 16_000


def ade20k() -> SegmentationRecipe:
    """Swin's settings for ADE20K (facts.md), which the paper refers to.

    160,000 updates of 16 crops of 512×512, AdamW at 6e-5 with weight decay 0.01, 1,500 updates of warm-up and then
    down to 0 in a straight line; stochastic depth 0.3, as in Swin's own segmentation. Its mIoU of 44.5 is that of
    the whole picture at one scale.
    """
    return SegmentationRecipe(
        name="ade20k/swin_tiny",
        model=ModelSpec("upernet", {"backbone": "swin_tiny_patch4_window7_224", "num_classes": 150}),
        data="ade20k:ade20k",
        scale=(2048, 512),
        crop_size=512,
        epochs=_UPDATES // _UPDATES_BETWEEN_EVALUATIONS,
        epoch_updates=_UPDATES_BETWEEN_EVALUATIONS,
        batch_size=16,
        opt="adamw",
        lr=6e-5,
        weight_decay=0.01,
        warmup_epochs=1500 / _UPDATES_BETWEEN_EVALUATIONS,
        warmup_lr=6e-11,
        min_lr=0.0,
        sched="poly",
        poly_power=1.0,
        clip_grad=None,
        amp_dtype="bfloat16",
        workers=8,
    )


def _row(row: dict[str, Any], baseline: dict[str, Any] | None) -> tuple[str, Callable[[], SegmentationRecipe]]:
    name = "ade20k/" + row["row"].lower().removesuffix("-t upernet").replace("-", "_") + "_tiny"

    def model_of_row(found: dict[str, Any]) -> ModelSpec:
        model, arguments = model_of(found) or ("", {})
        return ModelSpec(model, {**arguments, "backbone_args": {"drop_path_rate": _STOCHASTIC_DEPTH}})

    def make() -> SegmentationRecipe:
        return dataclasses.replace(
            ade20k(),
            name=name,
            model=model_of_row(row),
            baseline=model_of_row(baseline) if baseline else None,
            expected={"val_miou": row["mIoU"], "val_macc": row["mAcc"]},
        )

    make.__doc__ = (
        f"Table 3, {row['row']}: {row['mIoU']} mIoU, {row['mAcc']} mAcc, {row['params_M']}M parameters, "
        f"{row['flops_G']}G MACs.\n\n"
        f"`stepsnet train {name} --data ade20k:PATH backbone=RUN`, where RUN is a run of an imagenet/… recipe\n"
        "or its checkpoint; not yet run by us at this scale."
    )
    return name, make


ROWS = printed_rows("3")
RECIPES = dict(_row(row, ROWS[0] if row is not ROWS[0] else None) for row in ROWS)
