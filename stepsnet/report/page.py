"""The self-contained HTML page of one run, a comparison or a sweep, with its figures beside it.

The data flow one way: folders -> :class:`LoadedRun` -> :class:`Group` (the seeds of one model) -> :class:`ReportFigure`
-> page. Every sentence that states a result is computed from the numbers of the figure beside it.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..errors import UserError
from ..files.own_files import write_own_files
from ..files.writing import encodable
from ..metrics import METRICS, format_metric, metric_label
from ..output.terminal import printable
from ..plan import steps_as_text
from ..run_folder.provenance import joined
from .confusion import confusion_figure
from .curves import curves_figure
from .depth import depth_figure, results_figure
from .figure import ReportFigure, csv_of, in_style
from .load_runs import Group, LoadedRun, group_runs, load_run, members, varied_settings
from .residual_stream import stream_figure
from .sections import class_table, data_notes, examples, picture_source
from .shortcut_ratio import shortcut_ratio_figure
from .widths import widths_figure
from .words import count, duration, key_in_words, number, summarize_results, typeset, updates_in_words

__all__ = ["figures_of", "write_report"]

_MAX_CURVES = 6  # models; more cannot be distinguished in one figure
_SUFFIXES = ("csv", "svg", "png")  # of a figure's files


def write_report(runs: Sequence[Path], out: Path, title: str | None = None, force: bool = False) -> Path:
    """Write the page of one run, a comparison or a sweep, and beside it ``figures/`` with PNG, SVG and CSV files.

    Args:
        runs: run folders, finished or not.
        out: the page to write, or an existing folder to write ``report.html`` in.
        title: of the page; by default the recipes' names.
        force: replace files that are not those of an earlier report.

    Returns:
        The path of the page, one HTML file that loads nothing else. The same runs give the same bytes.

    Raises:
        NotOurFile: the page or a file of a figure would replace one that no report has written.
        UserError: ``runs`` is empty, one of them is not a run folder, or the page cannot be written.
    """
    if not runs:
        raise UserError("report: got no run folder, expected at least one")
    out = Path(out)
    page = out / "report.html" if out.is_dir() else out
    loaded = [load_run(Path(run)) for run in runs]
    title = title or ", ".join(dict.fromkeys(str(run.config.get("name", run.folder.name)) for run in loaded))
    groups = group_runs(loaded)
    few = groups if len(groups) <= _MAX_CURVES else []
    figures = figures_of(groups)
    drawn: dict[str, bytes] = {}
    inline = [(figure, _files_of(figure, drawn)) for figure in figures.values() if figure]
    folder = "figures" if page.name == "report.html" else f"{page.stem}-figures"  # pages may stand side by side
    columns = _metric_columns(groups)
    sentence, tiles = summarize_results(groups)
    origins = _origins(groups)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    text = html.render(
        title=title,
        about=_about(loaded),
        sentence=sentence,
        tiles=tiles,
        figures=inline,
        groups=groups,
        many_models=len(groups) > _MAX_CURVES,
        classes=class_table(few),
        examples=examples(few),
        picture_source=picture_source,
        printable=printable,
        data_notes=data_notes(groups),
        metric_columns=[metric_label(name, with_unit=True) for name in columns],
        runs=_table_of_runs(groups, columns),
        models=_table_of_models(groups),
        varied=varied_settings(groups),
        folder=folder,
        origins=origins,
        made_differently=len(origins) > 1 or any(run.summary.get("trained_before") for run in loaded),
    )
    contents = {f"{folder}/{name}": content for name, content in drawn.items()}
    contents[page.name] = encodable(text).encode()  # last: where the page is, its figures are
    every = [f"{folder}/{_file_of(name, suffix)}" for name in figures for suffix in _SUFFIXES]
    outdated = [name for name in every if name not in contents]
    how = "`stepsnet report --force`"
    write_own_files(page.parent, contents, outdated, force=force, how_to_replace=how)
    return page


def _about(runs: Sequence[LoadedRun]) -> str:
    """The title of the recipe, if all runs have the same one."""
    titles = {str(run.config.get("title") or "") for run in runs}
    return titles.pop() if len(titles) == 1 else ""


def figures_of(groups: Sequence[Group]) -> dict[str, ReportFigure | None]:
    """The report's figures by name; None where there is nothing to draw, or too many models to distinguish."""
    few = groups if len(groups) <= _MAX_CURVES else []
    metrics = ["loss", *(metric.key for metric in METRICS.values() if metric.is_headline)]
    return {
        "depth": depth_figure(groups),
        "results": results_figure(groups),
        **{key.replace("_", "-"): curves_figure(few, key) for key in metrics},
        "confusion": confusion_figure(few),
        "shortcut-ratio": shortcut_ratio_figure(few),
        "stream": stream_figure(few),
        "widths": widths_figure(few),
    }


def _file_of(figure: str, suffix: str) -> str:
    return f"{figure}.{suffix}"


def _files_of(figure: ReportFigure, contents: dict[str, bytes]) -> list[Markup]:
    """Add a figure's CSV, SVG and PNG to ``contents``; returns the SVG of both layouts, for the page."""
    contents[_file_of(figure.name, "csv")] = encodable(csv_of(figure.rows)).encode()
    return _draw(figure, contents)


def _draw(figure: ReportFigure, contents: dict[str, bytes]) -> list[Markup]:
    inline = []
    for layout in ("wide", "narrow"):
        # each SVG has its own salt, so that ids do not repeat on the page
        with in_style(svg_hashsalt=f"{figure.name}-{layout}"):
            drawn, svg, png = figure.draw(layout == "narrow"), io.BytesIO(), io.BytesIO()
            drawn.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            if layout == "wide":
                drawn.set_layout_engine("none")  # the layout is done, and must not be done again
                drawn.savefig(png, format="png", dpi=150, metadata={"Software": None})
                contents[_file_of(figure.name, "svg")] = svg.getvalue()
                contents[_file_of(figure.name, "png")] = png.getvalue()
        _, box, body = re.split(r'<svg[^>]* viewBox="([^"]+)"[^>]*>', svg.getvalue().decode())
        body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", body)
        body = re.sub(r'(<g) id="[^"]*"', r"\1", body)  # nothing refers to the ids of groups
        body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
        inline.append(
            Markup(f'<svg class="{layout}" viewBox="{box}" role="img" aria-labelledby="{figure.name}">{body}')
        )
    return inline


def _metric_columns(groups: Sequence[Group]) -> list[str]:
    """The metrics that the table of runs shows: those that some run has, the validation split first."""
    runs = [run for _, run in members(groups)]
    names = [f"val_{metric.key}" for metric in METRICS.values() if not metric.is_detail]
    names += [f"train_{metric.key}" for metric in METRICS.values() if metric.is_headline]
    return [name for name in names if any(run.value(name) is not None for run in runs)]


def _table_of_runs(groups: Sequence[Group], columns: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for group, run in members(groups):
        get, values = run.summary.get, [run.value(name) for name in columns]
        metrics = [
            "—" if value is None else typeset(format_metric(name, value, unit=False))
            for name, value in zip(columns, values)
        ]
        size = (run.blocks or "—", get("layers", "—"), count(get("params")), count(get("macs")))
        cells = [run.seed, *metrics, *size, duration(get("seconds")), number(_samples_per_second(run), ".1f")]
        ended = "not finished" if run.diverged is None else f"diverged at update {run.diverged}"
        note = f"{ended}: {max(run.epochs, default=0)} of {run.config.get('epochs', '?')} epochs"
        rows.append({"group": group, "cells": cells, "note": "" if run.summary else note})
    return rows


def _samples_per_second(run: LoadedRun) -> float | None:
    measured = [line["samples_per_second"] for line in run.epochs.values() if line.get("samples_per_second")]
    return run.summary.get("samples_per_second") or (statistics.median(measured) if measured else None)


def _table_of_models(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        steps = steps_as_text(group.steps) or "—"
        cells = [steps, group.blocks or "—", group.summary_value("layers") or "—"]
        counts = [count(group.summary_value(key)) for key in ("params", "macs")]
        rows.append({"group": group, "cells": [*cells, *counts]})
    return rows


def _origins(groups: Sequence[Group]) -> list[tuple[dict[str, str], list[tuple[Group, LoadedRun]]]]:
    """The finished runs, grouped by commit, machine and versions."""
    found: dict[tuple[tuple[str, str], ...], list[tuple[Group, LoadedRun]]] = {}
    for group, run in members(groups):
        if run.summary:
            found.setdefault(tuple(_origin(run.summary).items()), []).append((group, run))
    return [(dict(origin), runs) for origin, runs in found.items()]


def _origin(summary: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with and, if it went on with something else, what it was made with before."""

    def made_with(part: Mapping[str, Any]) -> dict[str, str]:
        hardware = [f"{key_in_words(key)}: {value or 'none'}" for key, value in (part.get("hardware") or {}).items()]
        hardware += [f"processes: {part['ranks']}"] if part.get("ranks") else []
        versions = [f"{name} {version}" for name, version in (part.get("versions") or {}).items()]
        commit = str(part.get("commit") or "")
        return {"Commit": commit, "Hardware": ", ".join(hardware), "Versions": ", ".join(versions)}

    last, before = made_with(summary), {}
    for part in joined(summary.get("trained_before", [])):
        other = {name: text for name, text in made_with(part).items() if text != last[name]}
        before[updates_in_words(part).capitalize()] = "; ".join(other.values())
    return last | before
