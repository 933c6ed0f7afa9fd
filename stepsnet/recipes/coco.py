"""Detection: the twelve rows of Table 2 on COCO, and the same in small on Penn-Fudan's pedestrians.

`coco()` holds the settings of Swin's detectors, which the paper refers to (facts.md); all rows derive from it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from ..config import DetectionAugment, DetectionRecipe, ModelSpec
from ..paper.rows import TABLE_1, model_of, printed_rows

__all__ = ["RECIPES", "coco"]

_IMAGES = 117_266  # of train2017 that have objects
_SCHEDULES = {"1x": (12, (8.0, 11.0)), "3x": (36, (27.0, 33.0))}  # epochs, and after how many the rate goes down
# of Swin's detectors; a StepsNet takes its baseline's
_STOCHASTIC_DEPTH = {
    "1x": {"Swin-T": 0.1, "Swin-S": 0.2, "Swin-B": 0.3},
    "3x": {"Swin-T": 0.2, "Swin-S": 0.2, "Swin-B": 0.3},
}
_PRINTED = ("box_AP", "box_AP50", "box_AP75", "mask_AP", "mask_AP50", "mask_AP75")


def coco() -> DetectionRecipe:
    """Swin's settings for COCO, with Mask R-CNN on Swin-T and the 1x schedule.

    16 images a batch, AdamW 1e-4, weight decay 0.05, 1,000 updates of warm-up, rate down tenfold twice. The
    backbone is meant to start from ImageNet: `backbone=RUN`, the run or the weights of the classifier.
    """
    return DetectionRecipe(
        name="coco/mask_rcnn_swin_tiny",
        model=ModelSpec("mask_rcnn", {"backbone": TABLE_1["Swin-T"], "num_classes": 80}),
        data="coco:coco",
        augment=DetectionAugment(),
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


def _row_model(row: dict[str, Any]) -> ModelSpec:
    found = model_of(row)
    assert found is not None, row
    name, arguments = found
    backbone = row["row"].split()[0].removeprefix("Steps-")
    rate = _STOCHASTIC_DEPTH[row["schedule"]][backbone]
    return ModelSpec(name, {**arguments, "backbone_args": {"drop_path_rate": rate}, "num_classes": 80})


def _table_2() -> dict[str, Callable[[], DetectionRecipe]]:
    made = {}
    for table in ("2a", "2b"):
        rows = {row["row"]: row for row in printed_rows(table)}
        for title, row in rows.items():
            model, of_baseline = _row_model(row), title.removeprefix("Steps-")
            baseline = _row_model(rows[of_baseline]) if title != of_baseline else None
            name = f"coco/{model.name}_{model.args['backbone'].partition('_patch')[0]}"
            made[name] = _row_recipe(name, row, model, baseline)
    return made


def _row_recipe(
    name: str, row: dict[str, Any], model: ModelSpec, baseline: ModelSpec | None
) -> Callable[[], DetectionRecipe]:
    epochs, milestones = _SCHEDULES[row["schedule"]]
    printed = {f"val_{key.lower()}": row[key] for key in _PRINTED if row[key] is not None}
    recipe = dataclasses.replace(
        coco(), name=name, model=model, baseline=baseline, epochs=epochs, milestones=milestones, expected=printed
    )

    def make() -> DetectionRecipe:
        return copy.deepcopy(recipe)

    commands = f"`stepsnet train {name} --data coco:PATH backbone=RUN`"
    if baseline:
        commands += f", with its baseline `stepsnet compare {name} --data coco:PATH`"
    expected = ", ".join(f"{key} {value}" for key, value in printed.items())
    make.__name__ = name.replace("/", "_")
    make.__doc__ = "\n".join(
        [
            f"Table {row['table']}, {row['row']}, {row['schedule']}: box AP {row['box_AP']}, mask AP {row['mask_AP']}, "
            f"{row['flops_G']}G MACs.",
            "",
            f"{commands}.",
            f"Expected: {expected}; not yet run by us at this scale.",
        ]
    )
    return make


# Swin-T and Steps-Swin-T at a quarter of their width
_SMALL_STEPS = {
    "widths": ((24,), (48,), (48, 68, 96), (48, 68, 96, 136)),
    "depths": ((2,), (2,), (6, 3, 3), (4, 2, 2, 2)),
    "drop_path_rate": 0.0,
}
_SMALL_SWIN = {"embed_dim": 24, "depths": (2, 2, 6, 2), "num_heads": (1, 2, 4, 8), "drop_path_rate": 0.0}
_SMALL_HEADS = {
    "num_classes": 1,
    "size": 160,
    "max_size": 320,
    "anchors": (16, 32, 64, 128, 256),
    "channels": 32,
    "hidden": 128,
    "samples": 64,
}


def pennfudan_mask_rcnn() -> DetectionRecipe:
    """Pedestrians of Penn-Fudan (120 pictures), from nothing: Mask R-CNN on a narrow Steps-Swin and on its Swin.

    `stepsnet compare pennfudan/mask_rcnn --data coco:PATH`, a folder of `images/` and `instances_{train,val}.json`.
    An epoch takes half a minute on one core.
    """
    return DetectionRecipe(
        name="pennfudan/mask_rcnn",
        data="coco:data/pennfudan",
        model=ModelSpec(
            "mask_rcnn",
            {"backbone": TABLE_1["Steps-Swin-T"], "backbone_args": _SMALL_STEPS, **_SMALL_HEADS},
        ),
        baseline=ModelSpec("mask_rcnn", {"backbone": TABLE_1["Swin-T"], "backbone_args": _SMALL_SWIN, **_SMALL_HEADS}),
        augment=DetectionAugment(sizes=(128, 144, 160, 176, 192), max_size=320, crop=0.0),
        epochs=30,
        batch_size=4,
        lr=1e-3,
        warmup_epochs=1,
        log_interval=10,
    )


def pennfudan_cascade() -> DetectionRecipe:
    """Pedestrians of Penn-Fudan with Cascade Mask R-CNN, everything else as `pennfudan/mask_rcnn`.

    `stepsnet compare pennfudan/cascade --data coco:PATH`.
    """
    base = pennfudan_mask_rcnn()
    assert base.baseline is not None
    return dataclasses.replace(
        base,
        name="pennfudan/cascade",
        model=ModelSpec("cascade_mask_rcnn", base.model.args),
        baseline=ModelSpec("cascade_mask_rcnn", base.baseline.args),
    )


RECIPES = {
    **_table_2(),
    "pennfudan/mask_rcnn": pennfudan_mask_rcnn,
    "pennfudan/cascade": pennfudan_cascade,
}
