"""The figures of a sweep: a metric against the depth (Fig. 1), and the results of all models side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from ..metrics import SPLITS, Metric
from .figure import ReportFigure, csv_rows, make_panels
from .runs import BASELINE, Group
from .words import join, mean_std, number, result_metric, sentence

__all__ = ["depth_figure", "results_figure"]


def _splits(groups: Sequence[Group], metric: Metric) -> list[str]:
    return [split for split in ("train", "val") if all(group.results(f"{split}_{metric.key}") for group in groups)]


def depth_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """A metric against the number of blocks, as in Fig. 1.

    None unless every model has a result, no two models have the same label and depth, and there are several depths.
    """
    metric = result_metric(groups)
    labels_and_depths = [(group.label, len(group.widths)) for group in groups]
    depths = sorted({blocks for _, blocks in labels_and_depths})
    if metric is None or len(set(labels_and_depths)) < len(labels_and_depths) or len(depths) < 2:
        return None
    curves: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: len(group.widths)):
        curves.setdefault(group.label, []).append(group)
    splits = _splits(groups, metric)

    def draw(narrow: bool) -> Figure:
        figure, axes = make_panels(narrow, len(splits), 2, 2.4 if narrow else 2.9, sharey=True)
        for ax, split in zip(axes, splits):
            ax.set(title=SPLITS[split], xlabel="blocks", ylabel=metric.axis_label, xscale="log")
            ax.set_xticks(depths)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.tick_params(axis="x", which="minor", length=0)
            for label, curve in curves.items():
                color, blocks = curve[0].color, [len(group.widths) for group in curve]
                values = [list(group.results(f"{split}_{metric.key}").values()) for group in curve]
                ax.fill_between(blocks, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15)
                ax.plot(blocks, list(map(statistics.fmean, values)), "o-", color=color, label=label, markersize=4)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(curves))
        return figure

    def at(end: int) -> str:
        return join(
            f"{mean_std(list(curve[end].results(f'val_{metric.key}').values()), metric)} for "
            f"{_the(label)} at {len(curve[end].widths)} blocks"
            for label, curve in curves.items()
        )

    caption = sentence(f"The validation {metric.name} is {at(0)}", at(-1))
    about = "Points: mean over seeds. Shaded: from the lowest to the highest seed."
    return ReportFigure("depth", "Results by depth", about, caption, _rows(groups, metric, splits), draw)


def results_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """The result of every model, one row per model; None for fewer than three models, or without results."""
    metric = result_metric(groups)
    if metric is None or len(groups) < 3:
        return None
    values = [list(group.results(f"val_{metric.key}").values()) for group in groups]

    def draw(narrow: bool) -> Figure:
        figure, (ax,) = make_panels(narrow, 1, 1, 0.5 + (0.26 if narrow else 0.22) * len(groups))
        ax.set(xlabel=f"validation {metric.axis_label}", ylim=(len(groups) - 0.5, -0.5))
        ax.set_yticks(range(len(groups)), [group.name for group in groups], fontsize=6.5 if narrow else 8)
        for row, (group, seeds) in enumerate(zip(groups, values)):
            ax.plot(seeds, [row] * len(seeds), "o", color=group.color, markersize=3, alpha=0.45)
            ax.plot(statistics.fmean(seeds), row, "D", color=group.color, markersize=5)
        return figure

    def show(value: float) -> str:
        return number(value, metric.spec) + metric.unit

    ordered = sorted(zip(map(statistics.fmean, values), groups), key=lambda pair: pair[0])
    (low, least), *_, (high, most) = ordered
    said = f"The means range from {show(low)} for {least.the} to {show(high)} for {most.the}"
    about = "Dots: single seeds. Diamonds: mean over seeds."
    rows = _rows(groups, metric, _splits(groups, metric))
    return ReportFigure("results", "All models", about, sentence(said), rows, draw)


def _the(label: str) -> str:
    return f"the {label}" if label == BASELINE else label


def _rows(groups: Sequence[Group], metric: Metric, splits: Sequence[str]) -> list[dict[str, Any]]:
    facts = ("blocks", "layers", "params", "macs")
    return csv_rows(
        groups,
        lambda _, run: (
            [
                {"recipe": run.summary.get("recipe"), **{fact: run.summary.get(fact) for fact in facts}}
                | {split: run.value(f"{split}_{metric.key}") for split in splits}
            ]
            if run.summary
            else []
        ),
    )
