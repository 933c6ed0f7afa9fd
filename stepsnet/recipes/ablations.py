"""The ablations: numbers of steps (Table 8), depths (9), the order of widths (10) and stages (11)."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ClassificationRecipe
from ..paper.rows import printed_rows
from .imagenet import STOCHASTIC_DEPTH, row_model, row_recipe

__all__ = ["RECIPES", "ROWS"]

# Each table's rows by the name of their recipe; the first is what the others are compared with.
ROWS = {
    "8": {f"steps_{steps}": f"{steps} steps" for steps in (1, 2, 3, 4, 5)},
    "9": {
        "depths_0_0_12": "(0, 0, 12)",
        "depths_2_1_11": "(2, 1, 11)",
        "depths_6_3_9": "(6, 3, 9)",
        "depths_12_6_6": "(12, 6, 6)",
        "depths_18_9_3": "(18, 9, 3)",
        "depths_22_11_1": "(22, 11, 1)",
    },
    "10": {"wide_to_narrow": "Reverse", "narrow_to_wide": "Steps-Swin-T"},
    "11": {
        "stage_none": "StepsNet in none (Swin-T)",
        "stage_1": "StepsNet in stage 1",
        "stage_2": "StepsNet in stage 2",
        "stage_3": "StepsNet in stage 3",
        "stage_4": "StepsNet in stage 4",
        "stages_3_4": "StepsNet in stages 3 and 4",
    },
}


def _table(table: str, drop_path_rate: float) -> dict[str, Callable[[], ClassificationRecipe]]:
    rows = {row["row"]: row for row in printed_rows(table)}
    titles = list(ROWS[table].values())
    first = row_model(rows[titles[0]], drop_path_rate)
    return {
        f"ablations/{short}": row_recipe(
            f"ablations/{short}", rows[title], drop_path_rate, None if title == titles[0] else first
        )
        for short, title in ROWS[table].items()
    }


RECIPES = {
    **_table("8", STOCHASTIC_DEPTH["DeiT-S"]),
    **_table("9", STOCHASTIC_DEPTH["DeiT-S"]),
    **_table("10", STOCHASTIC_DEPTH["Swin-T"]),
    **_table("11", STOCHASTIC_DEPTH["Swin-T"]),
}
