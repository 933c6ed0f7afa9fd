"""ImageNet-1K: the rows of Table 1, the 302-layer model of Sec. 5.2 and the Swin++ pairs of Fig. 5.

`imagenet()` holds the settings; all recipes here, and those of `deeper` and `ablations`, derive from it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from ..config import Augment, ClassificationRecipe, ModelSpec
from ..paper.rows import TABLE_1, model_of, printed_rows

__all__ = ["RECIPES", "STOCHASTIC_DEPTH", "derive", "imagenet", "row_model", "row_recipe"]

# The baselines' own; a StepsNet takes its baseline's. Neither the paper nor the recipe it trains with gives
# the ResNets any.
STOCHASTIC_DEPTH = {
    "ResNet-18": 0.0,
    "ResNet-34": 0.0,
    "ResNet-50": 0.0,
    "DeiT-T": 0.1,
    "DeiT-S": 0.1,
    "DeiT-B": 0.1,
    "Swin-T": 0.2,
    "Swin-S": 0.3,
    "Swin-B": 0.5,
}


def imagenet() -> ClassificationRecipe:
    """The paper's settings for ImageNet-1K, with DeiT-S.

    From the Appendix: AdamW, 300 epochs, 20 of them warm-up, rate 1e-3 for 1,024 images and linear in the
    batch, weight decay 0.05, RandAugment, Mixup, CutMix and random erasing. The rest is Swin's recipe, which
    the paper refers to. ResNets train with the same: "all our models under the same settings".
    """
    return ClassificationRecipe(
        name="imagenet/deit_small",
        model=ModelSpec("deit_small_patch16_224", {"drop_path_rate": STOCHASTIC_DEPTH["DeiT-S"]}),
        data="folder:imagenet",
        crop_pct=0.875,  # 224 of 256
        augment=Augment(),
        label_smoothing=0.1,
        epochs=300,
        batch_size=1024,
        opt="adamw",
        lr=1e-3,
        lr_base_size=1024,
        weight_decay=0.05,
        warmup_epochs=20,
        warmup_lr=5e-7,
        min_lr=5e-6,
        clip_grad=5.0,
        amp_dtype="bfloat16",
        workers=8,
    )


def derive(
    name: str,
    title: str,
    model: ModelSpec,
    baseline: ModelSpec | None = None,
    expected: dict[str, float] | None = None,
    note: str = "",
) -> Callable[[], ClassificationRecipe]:
    """A recipe's function: `imagenet()` with another model. Its docstring's first line is ``title``."""

    recipe = dataclasses.replace(imagenet(), name=name, model=model, baseline=baseline, expected=expected or {})

    def make() -> ClassificationRecipe:
        return copy.deepcopy(recipe)

    commands = f"`stepsnet train {name} --data folder:PATH`"
    if baseline:
        commands += f", with its baseline `stepsnet compare {name} --data folder:PATH`"
    printed = ", ".join(f"{key} {value}" for key, value in recipe.expected.items()) or "the paper prints no number"
    lines = [title, "", f"{commands}.", *([note] if note else [])]
    lines.append(f"Expected: {printed}; not yet run by us at this scale.")
    make.__name__ = name.replace("/", "_")
    make.__doc__ = "\n".join(lines)
    return make


def row_model(row: dict[str, Any], drop_path_rate: float) -> ModelSpec:
    """A printed row's model, with stochastic depth."""
    found = model_of(row)
    assert found is not None, row
    model, arguments = found
    return ModelSpec(model, {**arguments, "drop_path_rate": drop_path_rate})


def row_recipe(
    name: str, row: dict[str, Any], drop_path_rate: float, baseline: ModelSpec | None, note: str = ""
) -> Callable[[], ClassificationRecipe]:
    """The recipe of a printed row of a table."""
    title = f"Table {row['table']}, {row['row']}: {row['top1']}% top-1, {row['params_M']}M parameters"
    title += f", {row['flops_G']}G MACs"
    if f"{row['blocks']} blocks" not in row["row"]:
        title += f", {row['blocks']} blocks"
    expected = {"val_top1": row["top1"]}
    return derive(name, f"{title}.", row_model(row, drop_path_rate), baseline, expected, note)


def _short(model: str) -> str:
    """``steps_swin_tiny_patch4_window7_224`` -> ``steps_swin_tiny``."""
    return model.partition("_patch")[0].partition("_window")[0]


def _table_1() -> dict[str, Callable[[], ClassificationRecipe]]:
    rows = {row["row"]: row for row in printed_rows("1")}
    made = {}
    for title, row in rows.items():
        of_baseline = title.removeprefix("Steps-")
        rate = STOCHASTIC_DEPTH[of_baseline]
        baseline = row_model(rows[of_baseline], rate) if title != of_baseline else None
        name = f"imagenet/{_short(TABLE_1[title])}"
        made[name] = row_recipe(name, row, rate, baseline)
    return made


def _d60() -> dict[str, Callable[[], ClassificationRecipe]]:
    (row,) = printed_rows("text 5.2")
    (of_baseline,) = (row for row in printed_rows("1") if row["row"] == "DeiT-B")
    model, rate = row_model(row, STOCHASTIC_DEPTH["DeiT-B"]), STOCHASTIC_DEPTH["DeiT-B"]
    name = f"imagenet/{_short(model.name)}"
    return {
        name: derive(
            name,
            f"Sec. 5.2, {row['row']}: {row['note']}, {row['blocks']} blocks.",
            model,
            row_model(of_baseline, rate),
            note=f"DeiT-B has {of_baseline['top1']} in Table 1; this model's own number is in no table.",
        )
    }


def _swinpp() -> dict[str, Callable[[], ClassificationRecipe]]:
    made = {}
    for size, of in (("tiny", "Swin-T"), ("small", "Swin-S"), ("base", "Swin-B")):
        args = {"drop_path_rate": STOCHASTIC_DEPTH[of]}
        baseline = ModelSpec(f"swinpp_{size}_window7_224", args)
        steps = ModelSpec(f"steps_swinpp_{size}_window7_224", args)
        plus = of.replace("Swin", "Swin++")
        note = f"Stochastic depth is {of}'s."
        made[f"imagenet/swinpp_{size}"] = derive(
            f"imagenet/swinpp_{size}", f"Fig. 5, {plus}: {of} with CMT's LPU and ConvFFN.", baseline, note=note
        )
        made[f"imagenet/steps_swinpp_{size}"] = derive(
            f"imagenet/steps_swinpp_{size}",
            f"Fig. 5, Steps-{plus}: Steps-{of} with CMT's LPU and ConvFFN.",
            steps,
            baseline,
            note=note,
        )
    return made


RECIPES = {**_table_1(), **_d60(), **_swinpp()}
