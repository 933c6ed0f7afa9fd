"""The figure of a classifier's confusion: how many samples of each class were taken for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ..run_folder.inspection import Confusion, read_inspection
from .figure import ReportFigure, csv_rows, make_panels
from .load_runs import Group, LoadedRun
from .words import number, sentence

__all__ = ["confusion_figure"]

_COUNTS_WRITTEN = 12  # classes; with more, the squares have no room for a number
_ABOUT = "Rows are the true classes, columns the predicted ones; a darker square is a larger share of its row."
_SHARES = LinearSegmentedColormap.from_list("shares", colormaps["Blues"](np.linspace(0, 0.85, 64)))


@dataclass(frozen=True)
class _Panel:
    group: Group
    classes: Sequence[str]
    counts: np.ndarray  # (true class, predicted class), over all seeds


def confusion_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """A matrix for each model, summed over its seeds; None if no run has recorded one."""
    panels = [panel for group in groups if (panel := _panel_of(group))]
    if not panels:
        return None
    rows = csv_rows([panel.group for panel in panels], lambda _, run: _rows(run))
    several = any(len(panel.group.runs) > 1 for panel in panels)
    return ReportFigure(
        "confusion",
        "Confusion",
        _ABOUT + (" The counts are sums over seeds." if several else ""),
        " ".join(_caption(panel) for panel in panels),
        rows,
        lambda narrow: _draw(panels, narrow),
    )


def _recorded(run: LoadedRun) -> Confusion | None:
    return next((section for section in read_inspection(run.folder) if isinstance(section, Confusion)), None)


def _panel_of(group: Group) -> _Panel | None:
    found = [confusion for run in group.counted if (confusion := _recorded(run))]
    if not found:
        return None
    classes = found[0].classes
    counts = sum(np.array(confusion.counts) for confusion in found if confusion.classes == classes)
    return _Panel(group, classes, np.asarray(counts))


def _rows(run: LoadedRun) -> list[dict[str, str | int]]:
    confusion = _recorded(run)
    if not confusion:
        return []
    names = confusion.classes
    return [
        {"class": names[true], "predicted": names[taken], "count": count}
        for true, row in enumerate(confusion.counts)
        for taken, count in enumerate(row)
        if count
    ]


def _caption(panel: _Panel) -> str:
    counts, right = panel.counts, np.trace(panel.counts)
    share = number(100 * right / counts.sum(), ".1f")
    said = f"Of {counts.sum()} predictions of {panel.group.the}, {right} are right ({share}%)"
    wrong = counts - np.diag(np.diag(counts))
    true, taken = np.unravel_index(wrong.argmax(), wrong.shape)
    if not wrong.any():
        return sentence(said)
    most = f"the most frequent mistake is {panel.classes[taken]} in place of {panel.classes[true]}"
    return sentence(said, f"{most} ({wrong[true, taken]} of {counts[true].sum()})")


def _draw(panels: Sequence[_Panel], narrow: bool) -> Figure:
    most = max(len(panel.classes) for panel in panels)
    columns = 2 if most <= _COUNTS_WRITTEN else 1
    side = 3.5 if narrow else 7.4 / min(columns, len(panels)) if most > _COUNTS_WRITTEN else 3.7
    figure, axes = make_panels(narrow, len(panels), columns, side)
    figure.set_layout_engine("compressed")  # it knows that the panels are squares
    for ax, panel in zip(axes, panels):
        _draw_panel(ax, panel, size=(4.5 if narrow else 6) if most > _COUNTS_WRITTEN else (6 if narrow else 7))
    return figure


def _draw_panel(ax: Axes, panel: _Panel, size: float) -> None:
    counts, count = panel.counts, len(panel.classes)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    ax.pcolormesh(shares, cmap=_SHARES, vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    ax.set(title=panel.group.name, xlabel="predicted", ylabel="true", aspect="equal", ylim=(count, 0))
    ax.grid(visible=False)
    ax.tick_params(length=0)
    names = [name if len(name) <= 14 else f"{name[:13]}…" for name in panel.classes]
    middles = np.arange(count) + 0.5
    ax.set_xticks(middles, names, rotation=0 if max(map(len, names)) <= 2 else 90, fontsize=size)
    ax.set_yticks(middles, names, fontsize=size)
    if count > _COUNTS_WRITTEN:
        return
    for true, taken in zip(*np.nonzero(counts)):
        color = "white" if shares[true, taken] > 0.5 else "#1b222d"
        x, y, text = taken + 0.5, true + 0.5, str(counts[true, taken])
        ax.text(x, y, text, ha="center", va="center", fontsize=size, color=color)
