"""The figure of the width of every block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .figure import ReportFigure, draw_legend_above, make_panels
from .load_runs import Group
from .words import sentence

__all__ = ["widths_figure"]


def widths_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """The width of every block, one row per group, colored by step; None if no widths are known."""
    shown = [group for group in groups if group.widths]
    if not shown:
        return None
    rows = [
        {"label": group.name, "step": step, "block": block, "width": width}
        for group in shown
        for block, (step, width) in enumerate(
            ((step, width) for step, (width, depth) in enumerate(group.steps, 1) for _ in range(depth)), 1
        )
    ]
    return ReportFigure("widths", "Width of each block", "", _caption(shown), rows, lambda narrow: _draw(shown, narrow))


def _caption(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        steps, num_blocks = group.steps, len(group.widths)
        different = len({width for width, _ in steps})  # a plain network of stages has several too
        of_widths = f"of {different} widths, from {steps[0][0]} channels in the first to {steps[-1][0]} in the last,"
        parts.append(
            f"{num_blocks} blocks {of_widths if different > 1 else f'of {steps[0][0]} channels'} for {group.the}"
        )
    return "There are " + sentence(*parts)


def _draw(groups: Sequence[Group], narrow: bool) -> Figure:
    num_blocks, max_width = max(len(group.widths) for group in groups), max(max(group.widths) for group in groups)
    max_steps = max(len(group.steps) for group in groups)
    figure, axes = make_panels(narrow, len(groups), 1, 1.75, sharex=True, sharey=True)
    for ax, group in zip(axes, groups):
        ax.set(xlabel="block", ylabel="width (channels)", xlim=(0.5, num_blocks + 0.5), ylim=(0, 1.05 * max_width))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.grid(axis="x", visible=False)
        handles: list[Any] = []
        start = 1
        for step, (width, depth) in enumerate(group.steps):
            color = colormaps["viridis_r"](0.2 + 0.75 * step / max(1, max_steps - 1))
            ax.bar(range(start, start + depth), width, width=0.82, color=color)
            handles, start = [*handles, Patch(color=color)], start + depth
        names = [f"{width}×{depth}" for width, depth in group.steps]
        draw_legend_above(ax, f"{group.name}: width × blocks", handles, names, 3 if narrow else 8)
    return figure
