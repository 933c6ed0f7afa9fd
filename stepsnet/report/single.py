"""One figure of a report, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..errors import UserError, nearest
from .figure import ReportFigure, in_style
from .load_runs import group_runs, load_run
from .page import figures_of

__all__ = ["draw_figure", "figure_names"]


def figure_names(runs: Sequence[Path]) -> list[str]:
    """The names of the figures that the report of these runs has."""
    return list(_figures(runs))


def draw_figure(runs: Sequence[Path], name: str) -> Figure:
    """A figure of the report of these runs, in its wide layout.

    Raises:
        UserError: there is no figure of that name, or a folder is not a run's.
    """
    figures = _figures(runs)
    if name not in figures:
        known = f"one of {', '.join(figures)}" if figures else "a run that has figures: this one has none yet"
        raise UserError(f"figure: got {name!r}, expected {known}{nearest(name, figures)}")
    with in_style():
        return figures[name].draw(False)


def _figures(runs: Sequence[Path]) -> dict[str, ReportFigure]:
    groups = group_runs([load_run(run) for run in runs])
    return {name: figure for name, figure in figures_of(groups).items() if figure}
