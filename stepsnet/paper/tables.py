"""The paper's printed tables: their cells, and the model of each row. commands/table.py counts the models."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..errors import UserError, nearest
from ..plan import heads_for

# The rows of Table 1 by the name of their model.
TABLE_1 = {
    "ResNet-18": "resnet18",
    "ResNet-34": "resnet34",
    "ResNet-50": "resnet50",
    "Steps-ResNet-18": "steps_resnet18",
    "Steps-ResNet-34": "steps_resnet34",
    "Steps-ResNet-50": "steps_resnet50",
    "DeiT-T": "deit_tiny_patch16_224",
    "DeiT-S": "deit_small_patch16_224",
    "DeiT-B": "deit_base_patch16_224",
    "Steps-DeiT-T": "steps_deit_tiny_patch16_224",
    "Steps-DeiT-S": "steps_deit_small_patch16_224",
    "Steps-DeiT-B": "steps_deit_base_patch16_224",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "Swin-S": "swin_small_patch4_window7_224",
    "Swin-B": "swin_base_patch4_window7_224",
    "Steps-Swin-T": "steps_swin_tiny_patch4_window7_224",
    "Steps-Swin-S": "steps_swin_small_patch4_window7_224",
    "Steps-Swin-B": "steps_swin_base_patch4_window7_224",
}

Stage = tuple[tuple[int, ...], tuple[int, ...]]  # widths and depths of its steps

# Steps-Swin-T's stages 3 and 4 and those of Swin-T, which Table 11 combines.
_STEPS_3, _STEPS_4 = ((192, 272, 384), (6, 3, 3)), ((192, 272, 384, 544), (4, 2, 2, 2))
_SWIN: list[Stage] = [((96,), (2,)), ((192,), (2,)), ((384,), (6,)), ((768,), (2,))]
TABLE_11: dict[str, list[Stage]] = {
    "StepsNet in stage 1": [((68, 96), (2, 1)), *_SWIN[1:]],
    "StepsNet in stage 2": [_SWIN[0], ((136, 192), (2, 1)), *_SWIN[2:]],
    "StepsNet in stage 3": [*_SWIN[:2], _STEPS_3, _SWIN[3]],
    "StepsNet in stage 4": [*_SWIN[:3], _STEPS_4],
    "StepsNet in stages 3 and 4": [*_SWIN[:2], _STEPS_3, _STEPS_4],
    "StepsNet in none (Swin-T)": _SWIN,
}

# The paper prints no widths or depths here; these give the printed parameters.
TABLE_4: dict[str, dict[str, Any]] = {
    "Transformer 30M": {"widths": [384], "depths": [6]},
    "Steps-Transformer 30M": {"widths": [192, 272, 384], "depths": [6, 3, 3]},
    "Transformer 44M": {"widths": [512], "depths": [6]},
    "Steps-Transformer 45M": {"widths": [256, 368, 512], "depths": [6, 3, 3]},
    "Transformer 63M": {"widths": [512], "depths": [12]},
    "Steps-Transformer 64M": {"widths": [256, 368, 512], "depths": [12, 6, 6]},
}

_PRINTED_IN_TABLE_14 = ("Swin 12 blocks", "Steps-Swin 26 blocks")  # Swin-T and Steps-Swin-T

DETECTORS = {"Mask R-CNN": "mask_rcnn", "Cascade Mask R-CNN": "cascade_mask_rcnn"}
ALLOCATION_IS_OURS = "the paper prints no allocation for this row; ours meets every printed cell, and others may too"
HALF_COMPUTE_RULE = "the paper prints no depths for this row; ours follow its half-compute rule (Sec. 5.5)"
TURNED_AROUND = "the paper prints Eq. 6 and the counts; ours turns the steps of each stage of Steps-Swin-T around"
TABLE_13_DIFFERS = (
    "Table 13 prints another Steps-DeiT-B, of 60 blocks; ours follows the half-compute rule (Sec. 5.5) from DeiT-B"
)
TABLE_12_DIFFERS = (
    "stages 1 and 2 are the baseline's, 64×2 and 128×3; Table 12 prints 64×1 and 128×1, which does not give the "
    "printed number of blocks"
)


@lru_cache(maxsize=1)
def all_rows() -> list[dict[str, Any]]:
    """Every row of tables.json: all that the paper prints, including Tables 6 and 7, whose rows are not models."""
    return json.loads((files("stepsnet.paper") / "tables.json").read_text(encoding="utf-8"))


def printed_rows(table: str) -> list[dict[str, Any]]:
    """The rows of tables.json for one table, in its order.

    Raises:
        UserError: there is no such table, or its rows are not models.
    """
    rows = all_rows()
    found = [row for row in rows if row["table"] == table]
    if not found or not any(model_of(row) for row in found):
        known = sorted({row["table"] for row in rows if model_of(row)}, key=lambda t: (t[0] == "t", len(t), t))
        raise UserError(f"table: got {table!r}, expected one of {', '.join(known)}{nearest(table, known)}")
    return found


def note_of(row: dict[str, Any]) -> str:
    """A note on what of a row's widths, depths or heads is not as printed in the paper; empty if all is."""
    table, name, config = row["table"], row["row"], row.get("config", {})
    if table == "1":
        return {
            "Steps-DeiT-B": TABLE_13_DIFFERS,
            "Steps-ResNet-34": TABLE_12_DIFFERS,
            "Steps-ResNet-50": TABLE_12_DIFFERS,
        }.get(name, "")
    if table == "4":
        return ALLOCATION_IS_OURS
    if table == "5a" and name.startswith("Steps-"):
        of_first, *of_others = config["depths"]
        by_the_rule = of_first == 2 * of_others[0] and len(set(of_others)) == 1
        return HALF_COMPUTE_RULE if by_the_rule else ALLOCATION_IS_OURS
    if table == "5b" and name not in _PRINTED_IN_TABLE_14:
        return ALLOCATION_IS_OURS
    if table == "8" and name not in ("1 steps", "3 steps"):  # DeiT-S and Steps-DeiT-S, which Table 13 prints
        return HALF_COMPUTE_RULE
    if table == "10" and name == "Reverse":
        return TURNED_AROUND
    if table == "11" and name in ("StepsNet in stage 1", "StepsNet in stage 2"):
        return ALLOCATION_IS_OURS
    return ""


def printed_row(table: str, title: str) -> dict[str, Any]:
    (row,) = (row for row in all_rows() if row["table"] == table and row["row"] == title)
    return row


def model_of(row: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The name and arguments of the model of a printed row; None for a row that is not a model."""
    table, name, config = row["table"], row["row"], row.get("config", {})
    if table == "1":
        return TABLE_1[name], {}
    if table in ("2a", "2b"):
        backbone, _, detector = name.partition(" ")
        return DETECTORS[detector], {"backbone": TABLE_1[backbone]}
    if table == "3":
        return "upernet", {"backbone": TABLE_1[name.removesuffix(" UPerNet")]}
    if table == "4":
        return "steps_transformer", {"vocab_size": 50_000, **TABLE_4[name]}
    if table == "text 5.2":
        return "steps_deit_base_d60_patch16_224", {}
    if table in ("5a", "8", "9"):
        base = "steps_deit_tiny_patch16_224" if table == "5a" else "steps_deit_small_patch16_224"
        return base, {"widths": config["widths"], "depths": config["depths"], "num_heads": config.get("heads")}
    if table == "5b":
        widths, depths = config.get("widths"), config["depths"]
        if widths is None:  # the baseline: C, 2C, 4C, 8C, one step per stage
            widths = [[config["embed_dim"] * 2**stage] for stage in range(4)]
            depths = [[depth] for depth in depths]
        heads = None
        if config.get("depths_printed") is False:
            # 136 takes 8 heads: with 4, the bias tables leave the row of 64 blocks at 28.74M, printed 28.8M
            heads = [[8 if width == 136 else heads_for(width, 32) for width in stage] for stage in widths]
        return "steps_swin_tiny_patch4_window7_224", {"widths": widths, "depths": depths, "num_heads": heads}
    if table == "10":
        stages = [*_SWIN[:2], _STEPS_3, _STEPS_4]
        if name == "Reverse":
            stages = [(widths[::-1], depths[::-1]) for widths, depths in stages]
        return "steps_swin_tiny_patch4_window7_224", _arguments_of(stages)
    if table == "11":
        return "steps_swin_tiny_patch4_window7_224", _arguments_of(TABLE_11[name])
    return None


def _arguments_of(stages: list[Stage]) -> dict[str, Any]:
    return {"widths": [widths for widths, _ in stages], "depths": [depths for _, depths in stages]}
