"""Tables 8, 9 and 10 in small on handwritten digits, and StepsNet beside and on top of other depth methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..config import ClassificationRecipe, ModelSpec
from ..plan import heads_for
from .small import DIGITS, digits_deep

__all__ = ["RECIPES"]

# widths and depths of each row; 96 in place of the 384 of Steps-DeiT-S, the depths are the paper's
_WIDTHS = (24, 34, 48, 68, 96)
_STEPS: dict[str, tuple[int, ...]] = {
    "steps_1": (12,),
    "steps_2": (12, 6),
    "steps_3": (12, 6, 6),
    "steps_4": (12, 6, 6, 6),
    "steps_5": (12, 6, 6, 6, 6),
    "depths_2_1_11": (2, 1, 11),
    "depths_6_3_9": (6, 3, 9),
    "depths_18_9_3": (18, 9, 3),
    "depths_22_11_1": (22, 11, 1),
    "wide_to_narrow": (12, 6, 6),
}
_TABLES = {"steps": "Table 8", "depths": "Table 9", "wide": "Table 10"}


def _ablation(row: str) -> Callable[[], ClassificationRecipe]:
    depths = _STEPS[row]
    widths = _WIDTHS[-len(depths) :]

    def model(depths: tuple[int, ...], widths: tuple[int, ...], **others: bool) -> ModelSpec:
        heads = tuple(heads_for(width, 16) for width in widths)
        shape = {"widths": widths, "depths": depths, "num_heads": heads}
        return ModelSpec("steps_deit_tiny_patch16_224", {**DIGITS, **shape, **others})

    def make() -> ClassificationRecipe:
        first = model((12, 6, 6), _WIDTHS[-3:]) if row == "wide_to_narrow" else model((12,), _WIDTHS[-1:])
        return dataclasses.replace(
            digits_deep(),
            name=f"digits_ablations/{row}",
            model=model(depths, widths, **({"reverse": True} if row == "wide_to_narrow" else {})),
            baseline=None if row == "steps_1" else first,
        )

    shape = ", ".join(f"{width}×{depth}" for width, depth in zip(widths, depths))
    make.__doc__ = (
        f"{_TABLES[row.partition('_')[0]]} in small, on handwritten digits: {shape}.\n\n"
        f"`stepsnet train digits_ablations/{row}`; `stepsnet sweep 'digits_ablations/*' --seeds 0,1,2` trains all. "
        "The settings are those of digits/deep."
    )
    return make


# None is timm's block as it is
_METHODS = {"pre_norm": None} | {m: m for m in ("layer_scale", "rezero", "deepnorm", "fixup", "normformer")}
_BLOCKS, _DEPTHS = 48, (27, 13, 8)


def _method(name: str, steps: bool) -> Callable[[], ClassificationRecipe]:
    def make() -> ClassificationRecipe:
        deep, method = digits_deep(), _METHODS[name]
        assert deep.baseline is not None
        chosen = {"depth_method": method} if method else {}
        in_steps = ModelSpec(deep.model.name, {**deep.model.args, "depths": _DEPTHS, **chosen})
        one_width = ModelSpec(deep.baseline.name, {**deep.baseline.args, "depths": (_BLOCKS,), **chosen})
        return dataclasses.replace(
            deep,
            name=f"digits_methods/{'steps' if steps else 'fixed_width'}_{name}",
            model=in_steps if steps else one_width,
            baseline=one_width if steps else None,
        )

    what = f"{_BLOCKS} blocks in three steps" if steps else f"{_BLOCKS} blocks of one width"
    make.__doc__ = (
        f"{name.replace('_', ' ')}, {what}, on handwritten digits.\n\n"
        f"`stepsnet train {make().name}`; `stepsnet sweep 'digits_methods/*' --seeds 0,1,2` sets StepsNet beside other "
        "depth methods and on top of each."
    )
    return make


RECIPES: dict[str, Callable[[], ClassificationRecipe]] = {
    **{f"digits_ablations/{row}": _ablation(row) for row in _STEPS},
    **{make().name: make for name in _METHODS for make in (_method(name, False), _method(name, True))},
}
