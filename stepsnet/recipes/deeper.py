"""Ever deeper at one compute a block (DeiT, Table 5a) or one compute in all (Swin, Table 5b)."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ClassificationRecipe
from ..paper.rows import note_of, printed_rows
from .imagenet import STOCHASTIC_DEPTH, row_model, row_recipe

__all__ = ["RECIPES"]


def _table(
    table: str, baselines: str, steps: str, drop_path_rate: float
) -> dict[str, Callable[[], ClassificationRecipe]]:
    """Recipes of a table; a StepsNet's baseline is the one of as many blocks, or of nearly as many."""
    rows = printed_rows(table)
    of_one_width = [row for row in rows if not row["row"].startswith("Steps-")]
    made = {}
    for row in rows:
        baseline, name = None, f"deeper/{baselines}_{row['blocks']}"
        if row not in of_one_width:
            nearest = min(of_one_width, key=lambda other: abs(other["blocks"] - row["blocks"]))
            baseline, name = row_model(nearest, drop_path_rate), f"deeper/{steps}_{row['blocks']}"
        note = f"Stochastic depth {drop_path_rate} at every depth; the paper prints none for this table."
        if of_allocation := note_of(row):
            note += f"\nOf the allocation: {of_allocation}."
        made[name] = row_recipe(name, row, drop_path_rate, baseline, note)
    return made


RECIPES = {
    **_table("5a", "fixed_width", "steps_deit", STOCHASTIC_DEPTH["DeiT-T"]),
    **_table("5b", "swin", "steps_swin", STOCHASTIC_DEPTH["Swin-T"]),
}
