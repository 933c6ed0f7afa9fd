"""Recipes of the paper's printed rows: the settings of a base, with a row's model and the numbers printed for it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from ..paper.tables import ALLOCATION_IS_OURS, model_of, note_of, printed_row
from ..settings.config import ModelSpec, Recipe

__all__ = ["by_name", "recipe_of_row", "spec_of_row"]

R = TypeVar("R", bound=Recipe)

# printed column -> metric
_METRICS = {
    "top1": "val_top1",
    "mIoU": "val_miou",
    "mAcc": "val_macc",
    "perplexity": "val_perplexity",
    **{f"{kind}_{ap}": f"val_{kind}_{ap.lower()}" for kind in ("box", "mask") for ap in ("AP", "AP50", "AP75")},
}


def recipe_of_row(
    base: R, name: str, table: str, row: str, *, baseline: str | None = None, note: str = "", **args: Any
) -> R:
    """``base`` with the model of a printed row.

    Args:
        row: its title in tables.json.
        baseline: the row of the same table that it is compared with.
        note: added to the recipe's title.
        **args: further arguments of the model and of its baseline, besides those of their rows.
    """
    printed = printed_row(table, row)
    if note_of(printed) == ALLOCATION_IS_OURS:
        note = f"{note}; {ALLOCATION_IS_OURS}" if note else ALLOCATION_IS_OURS
    numbers = {_METRICS[key]: float(value) for key, value in printed.items() if key in _METRICS and value is not None}
    where = f"Sec. {table.removeprefix('text ')}" if table.startswith("text") else f"Table {table}"
    return dataclasses.replace(
        base,
        name=name,
        title=f"{where}, {row}{f' ({note})' if note else ''}",
        model=spec_of_row(table, row, **args),
        baseline=spec_of_row(table, baseline, **args) if baseline else None,
        expected=numbers,
    )


def spec_of_row(table: str, row: str, **args: Any) -> ModelSpec:
    found = model_of(printed_row(table, row))
    assert found is not None, (table, row)
    model, arguments = found
    return ModelSpec(model, {**arguments, **args})


def by_name(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}
