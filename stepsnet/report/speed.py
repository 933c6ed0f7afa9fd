"""The figures of Fig. 6: accuracy against throughput, and throughput and memory against depth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..metrics import METRICS
from ..output.colors import OKABE_ITO
from .figure import in_style, save_figure, write_csv
from .load_runs import BASELINE, STEPS

__all__ = ["FILES", "draw_speed"]

FILES = ("speed.csv", *(f"speed-{name}.{kind}" for name in ("accuracy", "depth") for kind in ("png", "svg")))

MIB = 2**20
_OF_STEPS, _OF_BASELINE, *_REST = OKABE_ITO
_MARKERS = "osD^vP"  # of the families
_HALVES = (1.5, 2.5, 3.5)
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")
_SHARE_OF_A_DIGIT = 0.023  # of a panel's width, that a digit of a label takes
Value = Callable[[dict[str, Any]], float]


def draw_speed(result: dict[str, Any], out: Path) -> None:
    """Write ``speed.csv``, and ``speed-accuracy`` and ``speed-depth`` as PNG and SVG.

    Args:
        result: what ``stepsnet bench`` measured. ``speed-accuracy`` is drawn only if there are two accuracies,
            ``speed-depth`` only if a curve has two depths.
    """
    rows = result["rows"]
    write_csv(_table(rows), out / "speed.csv")
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        curves.setdefault(row["curve"], []).append(row)
    with in_style():
        _draw(result, curves, out)


def _draw(result: dict[str, Any], curves: dict[str, list[dict[str, Any]]], out: Path) -> None:
    rows = result["rows"]
    where = f"{result['device']}, {result['amp_dtype']}, batch of {result['batch_size']}"
    if len([row for row in rows if row["accuracy"] is not None]) > 1:
        with_accuracy = {name: [row for row in line if row["accuracy"] is not None] for name, line in curves.items()}
        scored = {name: line for name, line in with_accuracy.items() if line}
        panels = {f"{kind}, {where}": kind for kind in ("inference", "training") if kind in rows[0]}
        figure, axes = _axes(len(panels))
        for ax, (title, kind) in zip(axes, panels.items()):
            source = ", ".join(dict.fromkeys(row["accuracy_of"] for row in rows if row["accuracy_of"]))
            ax.set(
                title=title, xlabel=f"{kind} throughput (samples/s)", ylabel=f"{METRICS['top1'].axis_label}\n{source}"
            )
            ax.set_xscale("log")
            _lines(ax, scored, _median(kind), lambda row: row["accuracy"], kind)
            ax.xaxis.set_major_locator(LogLocator(subs=_subdivisions(*ax.get_xlim())))
            ax.xaxis.set_major_formatter(_PLAIN)
            ax.xaxis.set_minor_formatter(NullFormatter())
        _save(figure, axes, out / "speed-accuracy")
    with_blocks = {name: kept for name, line in curves.items() if (kept := [row for row in line if row["blocks"]])}
    if any(len({row["blocks"] for row in line}) > 1 for line in with_blocks.values()):
        drawn: list[tuple[str, str, Value, str | None]] = [
            (f"{kind}, {where}", "samples/s", _median(kind), kind)
            for kind in ("inference", "training")
            if kind in rows[0]
        ]
        for kind in rows[0].get("memory", {}):
            small, large, _ = rows[0]["memory"][kind]
            drawn.append((f"{kind}: peak memory from batch {small} to {large}", "MiB per sample", _memory(kind), None))
        figure, axes = _axes(len(drawn))
        for ax, (title, axis, value, timed) in zip(axes, drawn):
            ax.set(title=title, xlabel="blocks", ylabel=axis, xscale="log")
            _lines(ax, with_blocks, lambda row: row["blocks"], value, timed, vertical=True)
            blocks = sorted({row["blocks"] for line in with_blocks.values() for row in line})
            ax.set_xticks(blocks, _labels_apart(blocks))
            ax.minorticks_off()
            ax.yaxis.set_major_formatter(_PLAIN)
            ax.set_ylim(bottom=0)
        _save(figure, axes, out / "speed-depth")


def _median(kind: str) -> Value:
    return lambda row: row[kind]["median"]


def _memory(kind: str) -> Value:
    return lambda row: row["memory"][kind]["per_sample"] / MIB


def _table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    flat = []
    for row in rows:
        line = {key: row[key] for key in ("model", "blocks", "layers", "params", "macs", "accuracy")}
        for kind in ("inference", "training", "latency_ms"):
            if kind in row:
                low, high = row[kind]["quartiles"]
                line |= {kind: row[kind]["median"], f"{kind}_q1": low, f"{kind}_q3": high}
        for kind, sizes in row.get("memory", {}).items():
            line |= {f"memory_{kind}_{size}": value for size, value in sizes.items()}
        flat.append(line)
    return flat


def _axes(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.8 if count > 1 else 4.6, 0.4 + 2.9 * -(-count // 2)), layout="constrained")
    return figure, list(figure.subplots(-(-count // 2), min(count, 2), squeeze=False).flat)


def _lines(
    ax: Axes, curves: dict[str, list[dict[str, Any]]], x: Value, y: Value, kind: str | None, vertical: bool = False
) -> None:
    """One line per curve, with bars from the first to the third quartile of what was timed (``kind``).

    A StepsNet's line is solid and blue, its baseline's dashed and orange; others have colors of their own. Markers of
    StepsNets are filled. Where there are several families, such as ResNet and DeiT, each has its own marker.
    """
    families = list(dict.fromkeys(_family(name) for name in curves))
    others = iter(_REST * len(curves))
    families_in_steps = {_family(name) for name, line in curves.items() if line[0]["in_steps"]}
    for name, line in curves.items():
        in_steps, has_pair = line[0]["in_steps"], _family(name) in families_in_steps
        color = _OF_STEPS if in_steps else _OF_BASELINE if has_pair else next(others)
        marks = f"{_MARKERS[families.index(_family(name)) % len(_MARKERS)]}{'-' if in_steps else '--'}"
        line = sorted(line, key=x)
        (drawn,) = ax.plot([x(row) for row in line], [y(row) for row in line], marks, color=color, label=name)
        drawn.set(markersize=4, markerfacecolor=color if in_steps else "white")
        for row in line:
            if kind is None:
                break
            ends = row[kind]["quartiles"]
            bar = ([x(row)] * 2, ends) if vertical else (ends, [y(row)] * 2)
            ax.plot(*bar, color=color, linewidth=3, alpha=0.3, zorder=1)


def _family(name: str) -> str:
    """The name that a curve shares with its baseline's, as the paper and the commands call both."""
    return "" if name in (STEPS, BASELINE) else re.sub("^steps[-_]", "", name, flags=re.IGNORECASE)


def _subdivisions(low: float, high: float) -> tuple[float, ...]:
    """Where a logarithmic axis has labels within a decade: the fewer decades it shows, the more labels."""
    decades = math.log10(high / low)
    if decades > 1:
        return (1,) if decades > 2 else (1, 2, 5)
    return (1, 2, 3, 4, 6, 8) if decades > 0.5 else (*range(1, 10), *_HALVES)


def _labels_apart(values: Sequence[float]) -> list[str]:
    """The labels of a logarithmic axis, empty where there is no room after the previous one."""
    labels, last, width = [], -math.inf, math.log(max(values) / min(values)) or 1.0
    for value in values:
        text = f"{value:,}"
        place = math.log(value) / width
        has_room = place - last > _SHARE_OF_A_DIGIT * (len(text) + 0.6)
        labels.append(text if has_room else "")
        last = place if has_room else last
    return labels


def _save(figure: Figure, axes: list[Axes], path: Path) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    points = 72 * figure.get_figwidth()
    columns = int(points / (5.0 * max(map(len, labels)) + 40))  # 40: the line, and the gap to the next column
    figure.legend(handles, labels, loc="outside upper left", ncols=min(max(columns, 1), 4))
    save_figure(figure, path)
