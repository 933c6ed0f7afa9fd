"""scikit-learn's handwritten digits, which come with its installation and train in seconds to minutes on one core.

`stepsnet train digits/tiny`; `stepsnet compare digits/tuned`; `stepsnet sweep 'digits/steps_*' 'digits/fixed_width_*'`
(Fig. 1 in small); `stepsnet sweep 'digits_ablations/*'` (Tables 8 to 10); `stepsnet sweep 'digits_methods/*'`, a
StepsNet beside other depth methods and on top of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..plan import heads_for, steps_as_text
from ..settings.config import ClassificationRecipe, ModelSpec
from .table_rows import by_name

__all__ = ["RECIPES", "depth_recipes", "one_width", "three_steps"]


def _deit(widths: Sequence[int], depths: Sequence[int], heads: Sequence[int], **args: Any) -> ModelSpec:
    """Tokens of 2×2 pixels, averaged for the head: a class token is learnt late on so little data."""
    images = {"patch_size": 2, "class_token": False, "global_pool": "avg"}
    steps = {"widths": tuple(widths), "depths": tuple(depths), "num_heads": tuple(heads)}
    return ModelSpec("steps_deit_tiny_patch16_224", {**images, **steps, **args})


TINY = ClassificationRecipe(
    name="digits/tiny",
    title="a small Steps-DeiT: half a minute, for first tries and tests",
    data="digits",
    model=_deit((24, 34, 48), (4, 2, 2), (2, 2, 3)),
    baseline=_deit((48,), (4,), (3,)),
    img_size="data",
    epochs=20,
    batch_size=32,
    lr=4e-3,
    warmup_epochs=2,
    stream_epochs=5,
)

# Table 5a in small: one width of 32 against three steps up to 48. The depths of the steps match the compute of that
# many blocks of width 32 as closely as whole blocks allow (plan_steps).
DEPTHS = {12: (7, 3, 2), 24: (13, 7, 4), 48: (27, 13, 8), 96: (53, 27, 16)}


def one_width(blocks: int, **args: Any) -> ModelSpec:
    return _deit((32,), (blocks,), (2,), **args)


def three_steps(blocks: int, **args: Any) -> ModelSpec:
    return _deit((24, 34, 48), DEPTHS[blocks], (2, 2, 3), **args)


DEEP = dataclasses.replace(
    TINY,
    name="digits/deep",
    title="Sec. 5.3 in small: 96 blocks in three steps, against 96 of one width at the same compute",
    model=three_steps(96),
    baseline=one_width(96),
    epochs=18,
    batch_size=64,
    lr=1e-3,
    stream_epochs=1,
)

# the study evidence/digits chose the rate for each of the two separately, and found this long enough
TUNED = dataclasses.replace(
    DEEP,
    name="digits/tuned",
    title="24 blocks in three steps against 24 of one width, each tuned: undecided over five seeds",
    model=three_steps(24),
    baseline=one_width(24),
    epochs=72,
    lr=2e-3,
    warmup_epochs=4,
)


def depth_recipes(base: ClassificationRecipe, **args: Any) -> list[ClassificationRecipe]:
    """Return Table 5a in small: ``base`` with each number of blocks, of one width and in three steps."""
    family, found = base.name.partition("/")[0], []
    for blocks in DEPTHS:
        plain, steps = f"{family}/fixed_width_{blocks}", f"{family}/steps_{blocks}"
        title = f"Table 5a in small: {blocks} blocks"
        model, baseline = three_steps(blocks, **args), one_width(blocks, **args)
        found += [
            dataclasses.replace(base, name=plain, title=f"{title} of one width", model=baseline, baseline=None),
            dataclasses.replace(base, name=steps, title=f"{title} in three steps", model=model, baseline=baseline),
        ]
    return found


# Tables 8 to 10 in small: 96 in place of the 384 of Steps-DeiT-S; the depths are the paper's
_WIDTHS = (24, 34, 48, 68, 96)
_TABLE_8 = {
    "steps_1": (12,),
    "steps_2": (12, 6),
    "steps_3": (12, 6, 6),
    "steps_4": (12, 6, 6, 6),
    "steps_5": (12, 6, 6, 6, 6),
}
_TABLE_9 = {
    "depths_2_1_11": (2, 1, 11),
    "depths_6_3_9": (6, 3, 9),
    "depths_18_9_3": (18, 9, 3),
    "depths_22_11_1": (22, 11, 1),
}


def _ablation(
    table: str, name: str, depths: Sequence[int], baseline: Sequence[int] | None, widest_first: bool = False
) -> ClassificationRecipe:
    def model(depths: Sequence[int], order: int = 1) -> ModelSpec:
        widths = _WIDTHS[-len(depths) :]
        return _deit(widths[::order], depths[::order], [heads_for(width, 16) for width in widths[::order]])

    spec = model(depths, -1 if widest_first else 1)
    shape = steps_as_text(zip(spec.args["widths"], spec.args["depths"]))
    return dataclasses.replace(
        DEEP,
        name=f"digits_ablations/{name}",
        title=f"Table {table} in small: {shape}",
        model=spec,
        baseline=model(baseline) if baseline else None,
    )


# 48 blocks; pre-norm is timm's block, unchanged
_METHODS: dict[str, dict[str, str]] = {"pre_norm": {}} | {
    method: {"residual": method} for method in ("layer_scale", "rezero", "deepnorm", "fixup", "normformer")
}


def _method(name: str, args: dict[str, str]) -> list[ClassificationRecipe]:
    words = name.replace("_", " ")
    of_one_width = dataclasses.replace(
        DEEP,
        name=f"digits_methods/fixed_width_{name}",
        title=f"{words}, 48 blocks of one width",
        model=one_width(48, **args),
        baseline=None,
    )
    in_steps = dataclasses.replace(
        DEEP,
        name=f"digits_methods/steps_{name}",
        title=f"{words}, 48 blocks in three steps",
        model=three_steps(48, **args),
        baseline=one_width(48, **args),
    )
    return [of_one_width, in_steps]


RECIPES = by_name(
    TINY,
    DEEP,
    TUNED,
    *depth_recipes(DEEP),
    *(_ablation("8", name, depths, None if name == "steps_1" else (12,)) for name, depths in _TABLE_8.items()),
    *(_ablation("9", name, depths, (12,)) for name, depths in _TABLE_9.items()),
    _ablation("10", "wide_to_narrow", (12, 6, 6), (12, 6, 6), widest_first=True),
    *(recipe for name, args in _METHODS.items() for recipe in _method(name, args)),
)
