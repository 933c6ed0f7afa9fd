"""The figure of the shortcut ratio γ by depth at the ends of epochs, as in Fig. 2."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.figure import Figure

from .figure import ReportFigure, csv_rows, draw_legend_above, make_panels
from .load_runs import Group
from .words import number, sentence, values_in_words

__all__ = ["shortcut_ratio_figure"]

_MAX_EPOCHS = 6  # curves in a panel
_NAMES = {"gamma": "γ of the whole stream", "gamma_read": "γ of the part that is read"}
_ABOUT = Markup(
    "γ<sub>l</sub> = σ<sub>0</sub>/σ<sub>l</sub> is the standard deviation of what enters the first block over that of "
    "the features after block <i>l</i>. Near zero, later blocks receive little of the input, and, as the paper argues, "
    "little gradient flows back to it along the shortcut. "
)
_BOTH = (
    "Fig. 2 of the paper seems to draw γ of the whole stream. The part that is read is the channels that a block takes "
    "as its input: the norm in a StepsNet sees these alone, so Eq. (2) is about them. A block of full width reads the "
    "whole stream, and there the two are equal. "
)
_DEPTH = "Depth is the number of the block over the number of blocks; in a hierarchical model each stage starts anew."


@dataclass(frozen=True)
class _Panel:
    """One γ of one group: the mean over seeds after each block, by epoch."""

    group: Group
    quantity: str  # a field of BlockStatistics
    title: str
    curves: dict[int, list[float]]


def shortcut_ratio_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """γ by depth at up to six epochs, measured on the example batch; None if it was not measured.

    Each group has a panel for γ of the whole stream and, if its blocks read less than the whole, one for γ of the part
    that is read.
    """
    panels = [panel for group in groups for panel in _panels_of(group)]
    if not panels:
        return None
    shown = {panel.group.name: panel.curves for panel in panels}
    rows = csv_rows(
        [group for group in groups if group.name in shown],
        lambda group, run: (
            {
                "epoch": epoch,
                "block": index,
                "depth": index / len(measured.blocks),
                "width": block.width,
                "gamma": block.gamma,
                "gamma_read": block.gamma_read,
            }
            for epoch, measured in sorted(run.stream_at_epoch_ends.items())
            if epoch in shown[group.name]
            for index, block in enumerate(measured.blocks, 1)
        ),
    )
    about = _ABOUT + (_BOTH if any(panel.quantity == "gamma_read" for panel in panels) else "") + _DEPTH
    return ReportFigure(
        "shortcut-ratio", "Shortcut ratio", about, _caption(panels), rows, lambda narrow: _draw(panels, narrow)
    )


def _panels_of(group: Group) -> list[_Panel]:
    measured = sorted({epoch for run in group.counted for epoch in run.stream_at_epoch_ends})
    if not measured:
        return []
    epochs = _choose(measured)
    reads_a_part = any(m.reads_a_part for run in group.counted for m in run.stream_at_epoch_ends.values())
    panels = []
    for quantity in ("gamma", "gamma_read") if reads_a_part else ("gamma",):
        title = f"{group.name}: {_NAMES[quantity]}"
        curves = {epoch: _mean_over_runs(group, epoch, quantity) for epoch in epochs}
        panels.append(_Panel(group, quantity, title, curves))
    return panels


def _choose(epochs: list[int]) -> list[int]:
    """At most six: the first one, before training, the one after it, the last, and others evenly in between."""
    if len(epochs) <= _MAX_EPOCHS:
        return epochs
    between = _MAX_EPOCHS - 2
    return [epochs[0], *(epochs[1 + round(i * (len(epochs) - 2) / between)] for i in range(between + 1))]


def _mean_over_runs(group: Group, epoch: int, quantity: str) -> list[float]:
    of_runs = [m.values(quantity) for run in group.counted if (m := run.stream_at_epoch_ends.get(epoch))]
    return [statistics.fmean(values) for values in zip(*of_runs)]


def _caption(panels: Sequence[_Panel]) -> str:
    sentences = []
    for quantity, name in _NAMES.items():
        curves = [(panel.group, panel.curves) for panel in panels if panel.quantity == quantity]
        if not curves:
            continue
        several = any(len(by_epoch) > 1 for _, by_epoch in curves)
        ends = [max, min] if several else [max]
        said: list[str] = []
        for end in ends:
            last_block = [(group, end(by_epoch), by_epoch[end(by_epoch)][-1]) for group, by_epoch in curves]
            said.append(f"it is {values_in_words(last_block, number)}" if said else values_in_words(last_block, number))
        sentences.append(sentence(f"After the last block, {name} is {said[0]}", *said[1:]))
    return " ".join(sentences)


def _draw(panels: Sequence[_Panel], narrow: bool) -> Figure:
    epochs = sorted({epoch for panel in panels for epoch in panel.curves})
    drawn = [g for panel in panels for gammas in panel.curves.values() for g in gammas if not math.isnan(g)]
    figure, axes = make_panels(narrow, len(panels), 2, 2.7 if narrow else 3.0, sharex=True, sharey=True)
    for ax, panel in zip(axes, panels):
        top = 1.05 * max([1.0, *drawn])
        ax.set(xlabel="depth (0: input, 1: output)", ylabel="shortcut ratio γ", xlim=(0, 1), ylim=(0, top))
        handles: list[Any] = []
        for epoch, gammas in panel.curves.items():
            color = colormaps["viridis_r"](0.12 + 0.88 * epochs.index(epoch) / max(1, len(epochs) - 1))
            depth = [block / len(gammas) for block in range(len(gammas) + 1)]
            handles += ax.plot(depth, [1, *gammas], "-" if epoch else "--", color=color, linewidth=1.5)
        names = [f"epoch {epoch}" if epoch else "before training" for epoch in panel.curves]
        draw_legend_above(ax, panel.title, handles, names, 3)
    return figure
