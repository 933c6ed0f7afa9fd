"""The self-contained HTML page of one run, a comparison or a sweep, with its figures beside it.

The data flow one way: folders -> :class:`Run` -> :class:`Group` (the seeds of one model) -> :class:`Picture`
-> page. Every sentence that states a result is computed from the numbers of the figure beside it.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib import style

from ..errors import UserError
from ..files import write_atomically
from .depth import figure_depth, figure_results
from .figures import STYLE, Picture, figure_curves, figure_shortcut_ratio, figure_widths, write_csv
from .runs import Group, Run, group_runs, load_run, members
from .stream import figure_signal
from .words import count, duration, headline, number


def _save(picture: Picture, folder: Path) -> list[Markup]:
    """Write a picture's PNG, SVG and CSV; returns the SVG of both layouts, for the page."""
    inline = []
    write_csv(picture.rows, folder / f"{picture.name}.csv")
    for layout in ("wide", "narrow"):
        # a salt of its own keeps the ids of each SVG apart, as all of them share the page
        with style.context(["default", {**STYLE, "svg.hashsalt": f"{picture.name}-{layout}"}]):
            figure, svg, png = picture.draw(layout == "narrow"), io.BytesIO(), io.BytesIO()
            figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            if layout == "wide":
                figure.set_layout_engine("none")  # it is laid out by now
                figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                write_atomically(folder / f"{picture.name}.svg", svg.getvalue())
                write_atomically(folder / f"{picture.name}.png", png.getvalue())
        _, box, body = re.split(r'<svg[^>]* viewBox="([^"]+)"[^>]*>', svg.getvalue().decode())
        body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", body)
        body = re.sub(r'(<g) id="[^"]*"', r"\1", body)  # names of groups, to which nothing refers
        body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
        inline.append(
            Markup(f'<svg class="{layout}" viewBox="{box}" role="img" aria-labelledby="{picture.name}">{body}')
        )
    return inline


def _speed(run: Run) -> float | None:
    measured = [line["samples_per_second"] for line in run.epochs.values() if line.get("samples_per_second")]
    return run.summary.get("samples_per_second") or (statistics.median(measured) if measured else None)


# what a task is measured by, as the columns of the table of runs name it
_MEASURES = {
    "val_top1": "validation top-1 %",
    "train_top1": "training top-1 %",
    "val_miou": "validation mIoU %",
    "val_macc": "mAcc %",
    "val_pixel_accuracy": "pixel accuracy %",
    "val_box_ap": "box AP %",
    "val_box_ap50": "AP50",
    "val_mask_ap": "mask AP %",
    "val_mask_ap50": "AP50",
    "val_perplexity": "validation perplexity",
    "val_word_perplexity": "per word",
}


def _measures(groups: Sequence[Group]) -> dict[str, str]:
    runs = [run for _, run in members(groups)]
    return {key: name for key, name in _MEASURES.items() if any(run.value(key) is not None for run in runs)}


def _table_of_runs(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group, run in members(groups):
        get = run.summary.get
        results = [number(run.value(key)) for key in _measures(groups)] + [number(run.value("val_loss"), 3)]
        size = (run.blocks or "—", get("layers", "—"), count(get("params")), count(get("macs")))
        cells = [run.seed, *results, *size, duration(get("seconds")), number(_speed(run), 1)]
        note = f"unfinished: {max(run.epochs, default=0)} of {run.config.get('epochs', '?')} epochs"
        rows.append({"group": group, "cells": cells, "note": "" if run.summary else note})
    return rows


def _table_of_models(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        steps = ", ".join(f"{width}×{blocks}" for width, blocks in group.steps) or "—"
        cells = [steps, group.blocks or "—", group.fact("layers") or "—"]
        rows.append({"group": group, "cells": [*cells, count(group.fact("params")), count(group.fact("macs"))]})
    return rows


def _origins(groups: Sequence[Group]) -> list[tuple[dict[str, str], list[tuple[Group, Run]]]]:
    """The finished runs, those of one commit, machine and set of versions together."""
    found: dict[tuple[str, ...], list[tuple[Group, Run]]] = {}
    for group, run in members(groups):
        if run.summary:
            machine, versions = run.summary.get("hardware") or {}, run.summary.get("versions") or {}
            hardware = [f"{key.replace('_gib', ' in GiB')}: {value or 'none'}" for key, value in machine.items()]
            numbers = [f"{name} {number}" for name, number in versions.items()]
            place = (str(run.summary.get("commit") or ""), ", ".join(hardware), ", ".join(numbers))
            found.setdefault(place, []).append((group, run))
    return [(dict(zip(("Commit", "Hardware", "Versions"), place)), runs) for place, runs in found.items()]


def _pictures(groups: Sequence[Group]) -> dict[str, Picture | None]:
    """The figures by name, None where there is nothing to draw, or so many models that none could be told apart."""
    few = groups if len(groups) <= 6 else []
    return {
        "depth": figure_depth(groups),
        "results": figure_results(groups),
        "loss": figure_curves(few, "loss", "Loss", ""),
        "top1": figure_curves(few, "top1", "Top-1 accuracy", "\u00a0%"),
        "miou": figure_curves(few, "miou", "mIoU", "\u00a0%"),
        "box-ap": figure_curves(few, "box_ap", "Box AP", "\u00a0%"),
        "mask-ap": figure_curves(few, "mask_ap", "Mask AP", "\u00a0%"),
        "perplexity": figure_curves(few, "perplexity", "Perplexity", ""),
        "shortcut-ratio": figure_shortcut_ratio(few),
        "signal": figure_signal(few),
        "widths": figure_widths(few),
    }


def write_report(runs: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the page of one run, a comparison or a sweep, and beside it ``figures/`` with PNG, SVG and CSV files.

    Args:
        runs: run folders, finished or not.
        out: the page to write, or an existing folder to write ``report.html`` in.
        title: the page's; by default the recipes' names.

    Returns:
        The page: one HTML file that needs nothing else. The same runs give the same bytes.

    Raises:
        UserError: no run, a folder that holds none, or a place that cannot be written.
    """
    if not runs:
        raise UserError("report: got no run folder, expected at least one")
    out = Path(out)
    page = out / "report.html" if out.is_dir() else out
    loaded = [load_run(Path(run)) for run in runs]
    title = title or ", ".join(dict.fromkeys(str(run.config.get("name", run.folder.name)) for run in loaded))
    groups = group_runs(loaded)
    candidates = _pictures(groups)
    for name in (name for name, picture in candidates.items() if picture is None):
        for kind in ("csv", "png", "svg"):  # an earlier report's would be taken for this one's
            with suppress(OSError):  # a place that cannot be written is said when it is written
                (page.parent / "figures" / f"{name}.{kind}").unlink()
    sentence, tiles = headline(groups)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    text = html.render(
        title=title,
        sentence=sentence,
        tiles=tiles,
        pictures=[(picture, _save(picture, page.parent / "figures")) for picture in candidates.values() if picture],
        groups=groups,
        measured=list(_measures(groups).values()),
        runs=_table_of_runs(groups),
        models=_table_of_models(groups),
        origins=_origins(groups),
    )
    write_atomically(page, text.encode())
    return page
