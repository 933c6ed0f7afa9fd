"""Recipes that run anywhere in seconds to minutes, on data that comes with an installation."""

from __future__ import annotations

import dataclasses

from .recipe import ModelSpec, Recipe

# 16 tokens, averaged for the head: a class token is learnt late on so little data
_DIGITS = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "class_token": False,
    "global_pool": "avg",
}


def digits_tiny() -> Recipe:
    """A small Steps-DeiT on scikit-learn's handwritten digits: half a minute, for first tries and tests.

    `stepsnet train digits/tiny`
    """
    return Recipe(
        name="digits/tiny",
        data="digits",
        model=ModelSpec(
            "steps_deit_tiny_patch16_224",
            {**_DIGITS, "widths": (24, 34, 48), "depths": (4, 2, 2), "num_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_deit_tiny_patch16_224", {**_DIGITS, "widths": (48,), "depths": (4,), "num_heads": (3,)}
        ),
        epochs=20,
        batch_size=32,
        lr=4e-3,
        warmup_epochs=2,
        probe_epochs=5,
    )


def digits_deep() -> Recipe:
    """96 blocks on scikit-learn's handwritten digits, against 96 blocks of one width at the same compute.

    `stepsnet compare digits/deep`. The depths are `plan_steps`' for 96 blocks and the baseline's MACs;
    the setting of Sec. 5.3 in small: one width of 32 against three steps up to 48.
    """
    return dataclasses.replace(
        digits_tiny(),
        name="digits/deep",
        model=ModelSpec(
            "steps_deit_tiny_patch16_224",
            {**_DIGITS, "widths": (24, 34, 48), "depths": (53, 27, 16), "num_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_deit_tiny_patch16_224", {**_DIGITS, "widths": (32,), "depths": (96,), "num_heads": (2,)}
        ),
        epochs=18,
        batch_size=64,
        lr=1e-3,
        probe_epochs=1,
    )


RECIPES = {"digits/tiny": digits_tiny, "digits/deep": digits_deep}
