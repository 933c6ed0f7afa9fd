"""The figures: drawn in two layouts, with their numbers and what is seen in them."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..files import write_atomically
from .runs import Group, Run, members
from .words import join, number, sentence_of

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa3b0",
    "axes.grid": True,
    "axes.labelcolor": "#3d4654",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],  # comes with matplotlib: the same layout everywhere
    "font.size": 8.5,
    "grid.color": "#e6e9ee",
    "legend.borderaxespad": 0.3,
    "legend.borderpad": 0.1,
    "legend.columnspacing": 1.2,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.title_fontsize": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a dollar sign
    "xtick.color": "#5c6675",
    "ytick.color": "#5c6675",
}


@dataclass(frozen=True)
class Picture:
    """A figure in two layouts (``draw(narrow)``), its numbers, and what is seen in it, in words."""

    name: str
    heading: str
    about: str
    caption: str
    rows: list[dict[str, Any]]
    draw: Callable[[bool], Figure]


def save_figure(figure: Figure, place: Path) -> None:
    """As PNG and SVG; ``place`` is without the suffix."""
    for kind in ("png", "svg"):
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=150)
        write_atomically(place.with_suffix(f".{kind}"), content.getvalue())


def write_csv(rows: Sequence[dict[str, Any]], file: Path) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(file, table.getvalue())


def _value(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else value  # nan is what a drawn line leaves out


def mean_curve(runs: Sequence[Run], key: str) -> dict[int, tuple[float, float, float]]:
    """By epoch: the mean, least and greatest value over the runs."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for epoch, line in run.epochs.items():
            if line.get(key) is not None:
                found.setdefault(epoch, []).append(_value(line[key]))
    return {epoch: (statistics.fmean(v), min(v), max(v)) for epoch, v in sorted(found.items())}


def _said(
    curves: Sequence[tuple[Group, dict[int, float]]], end: Callable[..., int], digits: int, unit: str = ""
) -> str:
    """Each group's value at the first (``end=min``) or last epoch (``max``), in words."""
    epochs = [end(curve) for _, curve in curves]
    when = ["before training" if epoch == 0 else f"after epoch {epoch}" for epoch in epochs]
    together = len(set(when)) == 1
    return join(
        f"{number(curve[epoch], digits)}{unit} for {group.the}" + ("" if together else f" ({moment})")
        for (group, curve), epoch, moment in zip(curves, epochs, when)
    ) + (f" {when[0]}" if together else "")


def rows_of(groups: Sequence[Group], lines: Callable[[Group, Run], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"label": group.name, "seed": run.seed, "run": run.folder.name, **line}
        for group, run in members(groups)
        for line in lines(group, run)
    ]


def axes_for(narrow: bool, count: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """So many panels, in columns or, on a phone, one below the other."""
    columns = 1 if narrow else min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3.7 if narrow else 7.8, 0.4 + height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    for ax in axes[:count]:
        ax.tick_params(labelleft=True, labelbottom=True)  # also where an axis is shared
    return figure, axes[:count]


def _legend_above(ax: Axes, title: str, handles: list[Any], names: list[str], columns: int) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left", "handlelength": 1.3}
    ax.legend(handles, names, title=fill(title, 44), ncols=columns, **place)


def _in_a_sentence(heading: str) -> str:
    """Box AP -> box AP."""
    return heading[0].lower() + heading[1:]


def figure_curves(groups: Sequence[Group], quantity: str, heading: str, unit: str) -> Picture | None:
    """Training and validation ``loss`` or ``top1`` against the epoch; None when no run has recorded any."""
    panels = {f"train_{quantity}": "training", f"val_{quantity}": "validation"}
    found = {key: [(group, mean_curve(group.counted, key)) for group in groups] for key in panels}
    curves = {key: kept for key, lines in found.items() if (kept := [(g, curve) for g, curve in lines if curve])}
    if not curves:
        return None

    def draw(narrow: bool) -> Figure:
        figure, axes = axes_for(narrow, len(curves), 2, 2.2 if narrow else 2.7, sharey=True)
        for ax, (key, lines) in zip(axes, curves.items()):
            ax.set(
                title=panels[key],
                xlabel="epoch",
                ylabel=_in_a_sentence(heading) + (f" ({unit.strip()})" if unit else ""),
            )
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            for group, curve in lines:
                for run in group.runs if len(group.runs) > 1 else ():
                    one = mean_curve([run], key)
                    ax.plot(list(one), [v[0] for v in one.values()], color=group.colour, linewidth=0.7, alpha=0.5)
                epochs, (mean, low, high) = list(curve), zip(*curve.values())
                ax.fill_between(epochs, low, high, color=group.colour, alpha=0.15, linewidth=0)
                marker = "o" if len(epochs) == 1 else None
                ax.plot(epochs, mean, group.dash, color=group.colour, linewidth=1.9, marker=marker)
        names = [group.name.lstrip("_") for group in groups]  # a legend leaves out what begins with "_"
        handles = [Line2D([], [], color=g.colour, linestyle=g.dash, linewidth=1.9) for g in groups]  # type: ignore[arg-type]
        columns = max(1, (34 if narrow else 90) // (max(map(len, names)) + 6))
        figure.legend(handles, names, loc="outside upper left", ncols=columns)
        return figure

    said: list[str] = []
    for key, lines in curves.items():
        means = [(group, {epoch: v[0] for epoch, v in curve.items()}) for group, curve in lines]
        name = f"{'the' if said else 'The'} {panels[key]} {_in_a_sentence(heading)}"
        said.append(f"{name} is {_said(means, max, 1 if unit else 3, unit)}")
    about = "Bold: the mean over seeds; thin: single seeds; the band reaches from the lowest to the highest seed."
    rows = rows_of(
        groups,
        lambda _, run: (
            {"epoch": epoch, **{key: line.get(key) for key in curves}} for epoch, line in sorted(run.epochs.items())
        ),
    )
    several = any(len(group.runs) > 1 for group in groups)
    return Picture(quantity, heading, about if several else "", sentence_of(*said), rows, draw)


def figure_shortcut_ratio(groups: Sequence[Group]) -> Picture | None:
    """γ against the depth at up to six epochs, a panel a group, as in Fig. 2; None when it was not measured."""
    curves: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        measured = sorted({epoch for run in group.counted for epoch in run.ratios})
        if len(measured) > 6:  # the start, the first trained epoch, the last, and evenly between
            measured = [measured[0], *(measured[1 + round(i * (len(measured) - 2) / 4)] for i in range(5))]
        for epoch in measured:
            seeds = [run.ratios[epoch]["gamma"] for run in group.counted if epoch in run.ratios]
            means = [statistics.fmean(map(_value, gammas)) for gammas in zip(*seeds)]
            curves.setdefault(group.name, {})[epoch] = means
    shown = [group for group in groups if group.name in curves]
    if not shown:
        return None
    epochs = sorted({epoch for curve in curves.values() for epoch in curve})
    top = max(g for c in curves.values() for gammas in c.values() for g in [1.0, *gammas] if not math.isnan(g))

    def draw(narrow: bool) -> Figure:
        figure, axes = axes_for(narrow, len(shown), 2, 2.7 if narrow else 3.0, sharex=True, sharey=True)
        for ax, group in zip(axes, shown):
            ax.set(xlabel="depth (0: input, 1: output)", ylabel="shortcut ratio γ", xlim=(0, 1), ylim=(0, 1.05 * top))
            handles: list[Any] = []
            for epoch, gammas in curves[group.name].items():
                colour = colormaps["viridis_r"](0.12 + 0.88 * epochs.index(epoch) / max(1, len(epochs) - 1))
                depth = [block / len(gammas) for block in range(len(gammas) + 1)]
                handles += ax.plot(depth, [1, *gammas], "-" if epoch else "--", color=colour, linewidth=1.5)
            names = [str(epoch) if epoch else "0 (untrained)" for epoch in curves[group.name]]
            _legend_above(ax, f"{group.name}, after epoch", handles, names, 3)
        return figure

    last_block = [(group, {epoch: gammas[-1] for epoch, gammas in curves[group.name].items()}) for group in shown]
    said = f"At the last block γ is {_said(last_block, max, 2)}"
    before = f"it is {_said(last_block, min, 2)}" if len(epochs) > 1 else ""
    rows = rows_of(
        shown,
        lambda group, run: (
            {"epoch": epoch, "block": block, "depth": block / len(line["gamma"]), "width": width, "gamma": gamma}
            for epoch, line in sorted(run.ratios.items())
            if epoch in curves[group.name]
            for block, (width, gamma) in enumerate(zip(line["widths"], line["gamma"]), 1)
        ),
    )
    about = Markup(
        "γ<sub>l</sub> = σ<sub>0</sub>/σ<sub>l</sub> compares the spread of what enters the blocks with that of the "
        "features after block <i>l</i>. Where it nears zero, a block hardly sees the input and hardly sends gradient "
        "back to it. Depth is <i>l</i> over the number of blocks; in a hierarchical model each stage starts anew."
    )
    return Picture("shortcut-ratio", "Shortcut ratio", about, sentence_of(said, before), rows, draw)


def figure_widths(groups: Sequence[Group]) -> Picture | None:
    """The width of every block, a row a group, coloured by step; None when no widths are known."""
    shown = [group for group in groups if group.widths]
    if not shown:
        return None
    blocks, widest = max(len(group.widths) for group in shown), max(max(group.widths) for group in shown)
    most = max(len(group.steps) for group in shown)

    def draw(narrow: bool) -> Figure:
        figure, axes = axes_for(narrow, len(shown), 1, 1.75, sharex=True, sharey=True)
        for ax, group in zip(axes, shown):
            ax.set(xlabel="block", ylabel="width (channels)", xlim=(0.5, blocks + 0.5), ylim=(0, 1.05 * widest))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            ax.grid(axis="x", visible=False)
            handles: list[Any] = []
            start = 1
            for step, (width, depth) in enumerate(group.steps):
                colour = colormaps["viridis_r"](0.2 + 0.75 * step / max(1, most - 1))
                ax.bar(range(start, start + depth), width, width=0.82, color=colour)
                handles, start = [*handles, Patch(color=colour)], start + depth
            names = [f"{width}×{depth}" for width, depth in group.steps]
            _legend_above(ax, f"{group.name}: width × blocks", handles, names, 3 if narrow else 8)
        return figure

    said = []
    for group in shown:
        steps, n = group.steps, len(group.widths)
        many = f"in {len(steps)} steps, from {steps[0][0]} channels in the first to {steps[-1][0]} in the last"
        said.append(f"{n} blocks " + (many if len(steps) > 1 else f"of {steps[0][0]} channels") + f" for {group.the}")
    rows = [
        {"label": group.name, "step": step, "block": block, "width": width}
        for group in shown
        for block, (step, width) in enumerate(
            ((step, width) for step, (width, depth) in enumerate(group.steps, 1) for _ in range(depth)), 1
        )
    ]
    return Picture("widths", "Width of each block", "", "There are " + sentence_of(*said), rows, draw)
