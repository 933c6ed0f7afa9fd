"""What all figures share: the record that the page is made from, the style, the files, panels and legends."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..files.writing import write_atomically
from .load_runs import Group, LoadedRun, members

__all__ = [
    "ReportFigure",
    "csv_of",
    "csv_rows",
    "draw_legend_above",
    "figure_files",
    "in_style",
    "make_panels",
    "save_figure",
    "scale_by_size",
    "write_csv",
]

_SCRIPTS = (  # fonts that systems may have for characters that DejaVu Sans lacks
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS", "Unifont"),
)

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa3b0",
    "axes.grid": True,
    "axes.labelcolor": "#3d4654",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    # the first comes with matplotlib: the same layout everywhere
    "font.sans-serif": ["DejaVu Sans", *(name for name in _SCRIPTS if name in get_font_names()), "sans-serif"],
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


@contextmanager
def in_style(**changes: Any) -> Iterator[None]:
    """Draw in the style of all figures; a character that no font has becomes a box, without a warning for each."""
    changed = _STYLE | {key.replace("_", "."): value for key, value in changes.items()}
    with style.context(["default", changed]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        yield


class InlineFigure(Figure):
    """A figure that a notebook shows, whether pyplot has been imported or not."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        with in_style():
            self.savefig(content, format="png", dpi=110)
        return content.getvalue()


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the page, with the numbers it shows."""

    name: str  # of its files
    heading: str
    about: str  # how to read it
    caption: str  # what it shows, computed from ``rows``
    rows: list[dict[str, Any]]  # of its CSV file
    draw: Callable[[bool], Figure]  # True: the narrow layout, for a phone


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as PNG and SVG; ``path`` has no suffix."""
    for name, content in figure_files(figure, path.name).items():
        write_atomically(path.parent / name, content)


def figure_files(figure: Figure, name: str) -> dict[str, bytes]:
    """The figure as PNG and SVG, by the names of their files; ``name`` has no suffix."""
    found = {}
    for kind in ("png", "svg"):
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=150)
        found[f"{name}.{kind}"] = content.getvalue()
    return found


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    write_atomically(path, csv_of(rows))


def csv_of(rows: Sequence[dict[str, Any]]) -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def csv_rows(
    groups: Sequence[Group], rows_of: Callable[[Group, LoadedRun], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The rows that ``rows_of`` gives for each run, each preceded by what identifies the run."""
    return [
        {"label": group.name, "seed": run.seed, "run": run.folder.name, **row}
        for group, run in members(groups)
        for row in rows_of(group, run)
    ]


def make_panels(narrow: bool, count: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels, in columns or, in the narrow layout, one below the other."""
    columns = 1 if narrow else min(columns, count)
    rows = math.ceil(count / columns)
    figure = InlineFigure(figsize=(3.7 if narrow else 7.8, 0.4 + height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    for ax in axes[:count]:
        ax.tick_params(labelleft=True, labelbottom=True)  # also where an axis is shared
    return figure, axes[:count]


def scale_by_size(ax: Axes, sizes: Sequence[int]) -> None:
    """Make the x axis a logarithmic one of sizes, such as numbers of blocks, with ticks at these alone."""
    ax.set_xscale("log")
    ax.set_xticks(sizes)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_locator(NullLocator())
    if len(sizes) == 1:
        ax.set_xlim(sizes[0] / 2, sizes[0] * 2)


def draw_legend_above(ax: Axes, title: str, handles: list[Any], names: list[str], columns: int) -> None:
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left", "handlelength": 1.3}
    ax.legend(handles, names, title=fill(title, 44), ncols=columns, **above)
