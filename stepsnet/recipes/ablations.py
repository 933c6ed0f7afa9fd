"""The ablations: numbers of steps (Table 8), depths (9), the order of widths (10) and stages (11).

The first row of each table is the baseline of the others. The paper prints no stochastic depth for these tables; ours
is that of DeiT-S and Swin-T. Not yet trained by us at this scale.
"""

from __future__ import annotations

from ..settings.config import ClassificationRecipe
from .imagenet import IMAGENET
from .table_rows import by_name, recipe_of_row

__all__ = ["RECIPES"]

# recipe -> row
_TABLE_8 = {f"steps_{steps}": f"{steps} steps" for steps in (1, 2, 3, 4, 5)}
_TABLE_9 = {
    "depths_0_0_12": "(0, 0, 12)",
    "depths_2_1_11": "(2, 1, 11)",
    "depths_6_3_9": "(6, 3, 9)",
    "depths_12_6_6": "(12, 6, 6)",
    "depths_18_9_3": "(18, 9, 3)",
    "depths_22_11_1": "(22, 11, 1)",
}
_TABLE_10 = {"wide_to_narrow": "Reverse", "narrow_to_wide": "Steps-Swin-T"}
_TABLE_11 = {
    "stage_none": "StepsNet in none (Swin-T)",
    "stage_1": "StepsNet in stage 1",
    "stage_2": "StepsNet in stage 2",
    "stage_3": "StepsNet in stage 3",
    "stage_4": "StepsNet in stage 4",
    "stages_3_4": "StepsNet in stages 3 and 4",
}


def _table(table: str, rows: dict[str, str], drop_path_rate: float) -> list[ClassificationRecipe]:
    first = next(iter(rows.values()))
    return [
        recipe_of_row(
            IMAGENET,
            f"ablations/{name}",
            table,
            row,
            baseline=None if row == first else first,
            drop_path_rate=drop_path_rate,
        )
        for name, row in rows.items()
    ]


RECIPES = by_name(
    *_table("8", _TABLE_8, drop_path_rate=0.1),
    *_table("9", _TABLE_9, drop_path_rate=0.1),
    *_table("10", _TABLE_10, drop_path_rate=0.2),
    *_table("11", _TABLE_11, drop_path_rate=0.2),
)
