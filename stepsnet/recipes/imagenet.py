"""ImageNet-1K: the rows of Table 1, the 302-layer model of Sec. 5.2 and the Swin++ pairs of Fig. 5.

`stepsnet train imagenet/steps_deit_small --data folder:PATH`; a Steps model with its baseline by `stepsnet compare`.
No row has been trained by us at this scale.
"""

from __future__ import annotations

import dataclasses

from ..settings.config import Augment, ClassificationRecipe, ModelSpec
from .table_rows import by_name, recipe_of_row, spec_of_row

__all__ = ["IMAGENET", "RECIPES"]

# The paper's settings. From its Appendix A: AdamW, 300 epochs, 20 of them warmup, rate 1e-3 for 1,024 images and linear
# in the batch, weight decay 0.05, RandAugment, Mixup, CutMix and random erasing. The rest is Swin's recipe, which the
# paper refers to, as its code has it (gradients clipped at 5; its text says 1). The paper refers to DeiT's too, which
# has repeated augmentation (augment.aug_repeats=3) and no clipping. All models train with the same, as the paper says:
# "all our models under the same settings".
IMAGENET = ClassificationRecipe(
    name="imagenet",
    model=ModelSpec("deit_small_patch16_224"),
    data="folder:imagenet",
    crop_pct=0.875,  # 224 of 256
    augment=Augment(
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=0.4,
        auto_augment="rand-m9-mstd0.5-inc1",
        re_prob=0.25,
        mixup=0.8,
        cutmix=1.0,
    ),
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

# Row of Table 1 -> its recipe, and the stochastic depth of the baseline, which its StepsNet takes too. Neither the
# paper nor the recipe that it trains with gives the ResNets any.
_TABLE_1 = {
    "ResNet-18": ("resnet18", 0.0),
    "ResNet-34": ("resnet34", 0.0),
    "ResNet-50": ("resnet50", 0.0),
    "DeiT-T": ("deit_tiny", 0.1),
    "DeiT-S": ("deit_small", 0.1),
    "DeiT-B": ("deit_base", 0.1),
    "Swin-T": ("swin_tiny", 0.2),
    "Swin-S": ("swin_small", 0.3),
    "Swin-B": ("swin_base", 0.5),
}


def _swinpp(size: str, of: str, drop_path_rate: float) -> list[ClassificationRecipe]:
    """A pair of Fig. 5, which prints no numbers; stochastic depth is that of ``of``."""
    args = {"drop_path_rate": drop_path_rate}
    baseline = ModelSpec(f"swinpp_{size}_window7_224", args)
    steps = ModelSpec(f"steps_swinpp_{size}_window7_224", args)
    title = f"Fig. 5, {{}}: {{}}{of} with CMT's LPU and ConvFFN"
    plus = of.replace("Swin", "Swin++")
    return [
        dataclasses.replace(
            IMAGENET, name=f"imagenet/swinpp_{size}", title=title.format(plus, ""), model=baseline, baseline=None
        ),
        dataclasses.replace(
            IMAGENET,
            name=f"imagenet/steps_swinpp_{size}",
            title=title.format(f"Steps-{plus}", "Steps-"),
            model=steps,
            baseline=baseline,
        ),
    ]


RECIPES = by_name(
    *(
        recipe_of_row(IMAGENET, f"imagenet/{name}", "1", row, drop_path_rate=rate)
        for row, (name, rate) in _TABLE_1.items()
    ),
    *(
        recipe_of_row(IMAGENET, f"imagenet/steps_{name}", "1", f"Steps-{row}", baseline=row, drop_path_rate=rate)
        for row, (name, rate) in _TABLE_1.items()
    ),
    dataclasses.replace(  # its baseline is a row of another table
        recipe_of_row(
            IMAGENET,
            "imagenet/steps_deit_base_d60",
            "text 5.2",
            "Steps-DeiT-B, 302 layers",
            note="it matches DeiT-B, which has 81.8 in Table 1",
            drop_path_rate=0.1,
        ),
        baseline=spec_of_row("1", "DeiT-B", drop_path_rate=0.1),
    ),
    *_swinpp("tiny", "Swin-T", 0.2),
    *_swinpp("small", "Swin-S", 0.3),
    *_swinpp("base", "Swin-B", 0.5),
)
