"""The picture of Fig. 1: a measure against the depth, for training and validation, with the spread of the seeds."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from ..errors import UserError
from ..files import write_atomically
from .figures import STYLE
from .runs import COLOURS

__all__ = ["by_depth", "draw_depth"]

MEASURES = {"top1": "top-1 accuracy (%)", "loss": "loss"}  # the first that all runs have is drawn


def by_depth(rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, dict[int, dict[str, list[float]]]]]:
    """The measure, and its values over the seeds: label -> blocks -> split -> values.

    Raises:
        UserError: the runs have no measure in common.
    """
    measure = next((m for m in MEASURES if all(f"val_{m}" in row["metrics"] for row in rows)), None)
    if measure is None:
        raise UserError(f"sweep: the runs have none of {', '.join(MEASURES)} in common")
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for row in rows:
        cell = found.setdefault(row["label"], {}).setdefault(row["blocks"], {"train": [], "val": []})
        for split, values in cell.items():
            values.append(row["metrics"][f"{split}_{measure}"])
    return measure, {label: dict(sorted(depths.items())) for label, depths in found.items()}


def draw_depth(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write ``depth.png``, ``depth.svg`` and ``depth.csv``."""
    measure, found = by_depth(rows)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["recipe", "label", "seed", "blocks", "layers", "params", "macs", "train", "val"])
    for row in rows:
        cells = [row[key] for key in ("recipe", "label", "seed", "blocks", "layers", "params", "macs")]
        writer.writerow([*cells, row["metrics"][f"train_{measure}"], row["metrics"][f"val_{measure}"]])
    write_atomically(out / "depth.csv", table.getvalue())
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(7.8, 3.2), layout="constrained")
        for ax, (split, title) in zip(
            figure.subplots(1, 2, sharey=True), (("train", "training"), ("val", "validation"))
        ):
            ax.set(title=title, xlabel="blocks", ylabel=MEASURES[measure], xscale="log")
            ax.tick_params(labelleft=True)
            depths = sorted({blocks for curve in found.values() for blocks in curve})
            ax.set_xticks(depths, minor=False)
            ax.set_xticks([], minor=True)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            for colour, (label, curve) in zip(COLOURS, sorted(found.items(), reverse=True)):
                values = [cell[split] for cell in curve.values()]
                ax.fill_between(list(curve), list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15)
                ax.plot(
                    list(curve), [statistics.fmean(v) for v in values], "o-", color=colour, label=label, markersize=4
                )
        figure.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=len(found))
        for kind in ("png", "svg"):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=150)
            write_atomically(out / f"depth.{kind}", content.getvalue())
