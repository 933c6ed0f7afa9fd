"""The figure of a metric against the epoch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..metrics import METRICS, SPLIT_NAMES, format_metric, metric_label
from .figure import ReportFigure, csv_rows, make_panels
from .load_runs import Group, LoadedRun
from .words import sentence, values_in_words

__all__ = ["curves_figure"]

Curve = dict[int, tuple[float, float, float]]  # by epoch: mean, minimum and maximum over the runs


def curves_figure(groups: Sequence[Group], key: str) -> ReportFigure | None:
    """A metric of the training and of the validation split against the epoch; None if no run has recorded it."""
    curves: dict[str, list[tuple[Group, Curve]]] = {}
    for name in (f"train_{key}", f"val_{key}"):
        if recorded := [(group, curve) for group in groups if (curve := _curve_over_runs(group.counted, name))]:
            curves[name] = recorded
    if not curves:
        return None
    has_seeds = any(len(group.runs) > 1 for group in groups)
    about = "Thick lines: mean over seeds. Thin lines: single seeds. Shaded: from the lowest to the highest seed."
    rows = csv_rows(
        groups,
        lambda _, run: (
            {"epoch": epoch, **{name: line.get(name) for name in curves}} for epoch, line in sorted(run.epochs.items())
        ),
    )
    return ReportFigure(
        name=key.replace("_", "-"),
        heading=METRICS[key].heading,
        about=about if has_seeds else "",
        caption=_caption(curves),
        rows=rows,
        draw=lambda narrow: _draw(groups, curves, key, narrow),
    )


def _curve_over_runs(runs: Sequence[LoadedRun], name: str) -> Curve:
    found: dict[int, list[float]] = {}
    for run in runs:
        for epoch, line in run.epochs.items():
            if line.get(name) is not None:
                value = line[name]
                found.setdefault(epoch, []).append(math.nan if math.isinf(value) else value)  # nan leaves a gap
    return {epoch: (statistics.fmean(v), min(v), max(v)) for epoch, v in sorted(found.items())}


def _caption(curves: dict[str, list[tuple[Group, Curve]]]) -> str:
    parts: list[str] = []
    for name, recorded in curves.items():
        last = [(group, max(curve), curve[max(curve)][0]) for group, curve in recorded]
        values = values_in_words(
            last,
            lambda value, name=name: format_metric(name, value) if math.isfinite(value) else "not finite",  # type: ignore[misc]
        )
        parts.append(f"{'the' if parts else 'The'} {metric_label(name)} is {values}")
    return sentence(*parts)


def _draw(groups: Sequence[Group], curves: dict[str, list[tuple[Group, Curve]]], key: str, narrow: bool) -> Figure:
    figure, axes = make_panels(narrow, len(curves), 2, 2.2 if narrow else 2.7, sharey=True)
    for ax, (name, recorded) in zip(axes, curves.items()):
        ax.set(title=SPLIT_NAMES[name.partition("_")[0]], xlabel="epoch", ylabel=METRICS[key].axis_label)
        epochs_shown = {epoch for _, curve in recorded for epoch in curve}
        if len(epochs_shown) == 1:
            ax.set_xticks(list(epochs_shown))
        else:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        for group, curve in recorded:
            for run in group.runs if len(group.runs) > 1 else ():
                single = _curve_over_runs([run], name)
                ax.plot(list(single), [v[0] for v in single.values()], color=group.color, linewidth=0.7, alpha=0.5)
            epochs, (mean, low, high) = list(curve), zip(*curve.values())
            ax.fill_between(epochs, low, high, color=group.color, alpha=0.15, linewidth=0)
            marker = "o" if len(epochs) == 1 else None
            ax.plot(epochs, mean, group.linestyle, color=group.color, linewidth=1.9, marker=marker)
    drawn = {group.name for recorded in curves.values() for group, _ in recorded}
    shown = [group for group in groups if group.name in drawn]
    names = [group.name.lstrip("_") for group in shown]  # a legend leaves out what begins with "_"
    handles = [Line2D([], [], color=g.color, linestyle=g.linestyle, linewidth=1.9) for g in shown]  # type: ignore[arg-type]
    columns = max(1, (34 if narrow else 90) // (max(map(len, names)) + 6))
    figure.legend(handles, names, loc="outside upper left", ncols=columns)
    return figure
