"""Recipes that run anywhere in seconds to minutes, on data that comes with an installation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..config import Augment, ClassificationRecipe, ModelSpec

# 16 tokens, averaged for the head: a class token is learnt late on so little data
DIGITS = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "class_token": False,
    "global_pool": "avg",
}


def digits_tiny() -> ClassificationRecipe:
    """A small Steps-DeiT on scikit-learn's handwritten digits: half a minute, for first tries and tests.

    `stepsnet train digits/tiny`
    """
    return ClassificationRecipe(
        name="digits/tiny",
        data="digits",
        model=ModelSpec(
            "steps_deit_tiny_patch16_224",
            {**DIGITS, "widths": (24, 34, 48), "depths": (4, 2, 2), "num_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_deit_tiny_patch16_224", {**DIGITS, "widths": (48,), "depths": (4,), "num_heads": (3,)}
        ),
        epochs=20,
        batch_size=32,
        lr=4e-3,
        warmup_epochs=2,
        stream_epochs=5,
    )


def digits_deep() -> ClassificationRecipe:
    """96 blocks on scikit-learn's handwritten digits, against 96 blocks of one width at the same compute.

    `stepsnet compare digits/deep`. The depths are `plan_steps`' for 96 blocks and the baseline's MACs;
    the setting of Sec. 5.3 in small: one width of 32 against three steps up to 48.
    """
    return dataclasses.replace(
        digits_tiny(),
        name="digits/deep",
        model=ModelSpec(
            "steps_deit_tiny_patch16_224",
            {**DIGITS, "widths": (24, 34, 48), "depths": (53, 27, 16), "num_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_deit_tiny_patch16_224", {**DIGITS, "widths": (32,), "depths": (96,), "num_heads": (2,)}
        ),
        epochs=18,
        batch_size=64,
        lr=1e-3,
        stream_epochs=1,
    )


# 16 tokens of 8×8 pixels
_CIFAR10 = {"img_size": 32, "patch_size": 8, "num_classes": 10, "class_token": False, "global_pool": "avg"}


def cifar10_shallow() -> ClassificationRecipe:
    """24 narrow blocks on CIFAR-10, against 24 blocks of one width at the same compute.

    `stepsnet compare cifar10/shallow --data cifar10:PATH`, or `folder:PATH` for pictures in folders.
    """
    return ClassificationRecipe(
        name="cifar10/shallow",
        data="cifar10:data/cifar10",
        model=ModelSpec(
            "steps_deit_tiny_patch16_224",
            {**_CIFAR10, "widths": (24, 34, 48), "depths": (13, 7, 4), "num_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_deit_tiny_patch16_224", {**_CIFAR10, "widths": (32,), "depths": (24,), "num_heads": (2,)}
        ),
        crop_pct=1.0,
        augment=Augment(scale=(0.6, 1.0), color_jitter=0.0, auto_augment=None, re_prob=0.0, mixup=0.0, cutmix=0.0),
        train_samples=10_000,
        epochs=8,
        batch_size=64,
        lr=1e-3,
        warmup_epochs=1,
        stream_epochs=4,
    )


def cifar10_deep() -> ClassificationRecipe:
    """96 narrow blocks on CIFAR-10, against 96 blocks of one width at the same compute.

    `stepsnet compare cifar10/deep --data cifar10:PATH`: `cifar10/shallow` with the depths of `digits/deep`.
    """
    base, deep = cifar10_shallow(), digits_deep()
    assert base.baseline is not None
    return dataclasses.replace(
        base,
        name="cifar10/deep",
        model=ModelSpec(base.model.name, {**base.model.args, "depths": deep.model.args["depths"]}),
        baseline=ModelSpec(base.baseline.name, {**base.baseline.args, "depths": (96,)}),
    )


def _depth(deep: Callable[[], ClassificationRecipe], blocks: int, steps: bool) -> Callable[[], ClassificationRecipe]:
    """A recipe of 96 blocks with another number of them, in steps or of one width."""
    of_96 = deep()
    data, depths = of_96.name.partition("/")[0], _DEPTHS[blocks]

    def make() -> ClassificationRecipe:
        base = of_96.baseline
        assert base is not None and sum(depths) == blocks
        one_width = ModelSpec(base.name, {**base.args, "depths": (blocks,)})
        model = ModelSpec(of_96.model.name, {**of_96.model.args, "depths": depths}) if steps else one_width
        name = f"{data}/{'steps' if steps else 'fixed_width'}_{blocks}"
        return dataclasses.replace(of_96, name=name, model=model, baseline=one_width if steps else None)

    what = f"{blocks} blocks in three steps" if steps else f"{blocks} blocks of one width"
    make.__doc__ = (
        f"Table 5a in small: {what}, under the settings of {of_96.name}.\n\n"
        f"`stepsnet train {make().name}`; "
        f"`stepsnet sweep '{data}/steps_*' '{data}/fixed_width_*'` trains all depths (Fig. 1)."
    )
    return make


# of steps 24, 34 and 48 wide, as near to the compute of so many blocks of width 32 as whole blocks come
_DEPTHS = {12: (7, 3, 2), 24: (13, 7, 4), 48: (27, 13, 8), 96: (53, 27, 16)}

_depth_grid = [
    _depth(deep, blocks, steps) for deep in (digits_deep, cifar10_deep) for blocks in _DEPTHS for steps in (False, True)
]
RECIPES = {
    "digits/tiny": digits_tiny,
    "digits/deep": digits_deep,
    "cifar10/shallow": cifar10_shallow,
    "cifar10/deep": cifar10_deep,
    **{make().name: make for make in _depth_grid},
}
