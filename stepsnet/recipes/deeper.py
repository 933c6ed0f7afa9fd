"""Deeper and deeper: at constant compute per block (DeiT, Table 5a) or constant total compute (Swin, Table 5b).

A StepsNet's baseline is the one with as many blocks, or nearly as many. The paper prints no stochastic depth for these
tables; ours is that of DeiT-T and Swin-T at every depth. Fig. 1 also shows training accuracy: here it is that of 50,000
training images in evaluation, since training with Mixup yields none itself. Not yet trained by us at this scale.
"""

from __future__ import annotations

import dataclasses

from .imagenet import IMAGENET
from .table_rows import by_name, recipe_of_row

__all__ = ["RECIPES"]

_DEIT = (24, 36, 48, 72, 96)  # blocks
_SWIN = (12, 24, 48, 72, 96)
_STEPS_SWIN = {14: 12, 26: 24, 48: 48, 64: 72, 96: 96}  # blocks, and those of its baseline

# Fig. 2 shows γ of these models from the first epochs on
SETTINGS = dataclasses.replace(IMAGENET, stream_epochs=1, clean_samples=50_000)

RECIPES = by_name(
    *(
        recipe_of_row(SETTINGS, f"deeper/fixed_width_{blocks}", "5a", f"DeiT {blocks} blocks", drop_path_rate=0.1)
        for blocks in _DEIT
    ),
    *(
        recipe_of_row(
            SETTINGS,
            f"deeper/steps_deit_{blocks}",
            "5a",
            f"Steps-DeiT {blocks} blocks",
            baseline=f"DeiT {blocks} blocks",
            drop_path_rate=0.1,
        )
        for blocks in _DEIT
    ),
    *(
        recipe_of_row(SETTINGS, f"deeper/swin_{blocks}", "5b", f"Swin {blocks} blocks", drop_path_rate=0.2)
        for blocks in _SWIN
    ),
    *(
        recipe_of_row(
            SETTINGS,
            f"deeper/steps_swin_{blocks}",
            "5b",
            f"Steps-Swin {blocks} blocks",
            baseline=f"Swin {of_baseline} blocks",
            drop_path_rate=0.2,
        )
        for blocks, of_baseline in _STEPS_SWIN.items()
    ),
)
