"""The figures of a sweep: a metric against the depth (Fig. 1), and the results of all models side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from ..metrics import SPLIT_NAMES, Metric, metric_label
from .figure import ReportFigure, csv_rows, make_panels, scale_by_size
from .load_runs import Group, comparable
from .words import join, mean_std, number, result_metric, sentence

__all__ = ["depth_figure", "results_figure"]

_TITLES = SPLIT_NAMES | {"train_clean": "training, without augmentation"}
Curve = dict[int, Group]  # of one label, by number of blocks


def depth_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """A metric against the number of blocks, as in Fig. 1.

    None unless every model has a result from the same data and length of training, no two models have the same label
    and depth, and one label has several depths. Models whose number of blocks is not known are left out.
    """
    metric = result_metric(groups)
    shown = [group for group in groups if group.blocks]
    curves: dict[str, Curve] = {}
    for group in sorted(shown, key=lambda group: group.blocks or 0):
        curves.setdefault(group.label, {})[group.blocks or 0] = group
    has_duplicates = sum(map(len, curves.values())) < len(shown)
    if metric is None or not comparable(shown) or has_duplicates or max(map(len, curves.values()), default=0) < 2:
        return None
    splits = _splits(shown, metric)
    return ReportFigure(
        "depth",
        "Results by depth",
        "Points: mean over seeds. Shaded: from the lowest to the highest seed.",
        _depth_caption(curves, metric),
        _rows(shown, metric, splits),
        lambda narrow: _draw_depth(curves, metric, splits, narrow),
    )


def _depth_caption(curves: dict[str, Curve], metric: Metric) -> str:
    def at(end: Callable[..., int], labels: Iterable[str]) -> str:
        ends = [(label, end(curves[label])) for label in labels]
        return join(
            f"{mean_std(list(curves[label][blocks].results(f'val_{metric.key}').values()), metric)} for "
            f"{curves[label][blocks].the_label} at {blocks} block{'s' * (blocks > 1)}"
            for label, blocks in ends
        )

    several = [label for label, curve in curves.items() if len(curve) > 1]  # one point is stated once
    return sentence(f"The {metric_label(f'val_{metric.key}')} is {at(min, curves)}", at(max, several))


def _draw_depth(curves: dict[str, Curve], metric: Metric, splits: Sequence[str], narrow: bool) -> Figure:
    depths = sorted({blocks for curve in curves.values() for blocks in curve})
    figure, axes = make_panels(narrow, len(splits), 2, 2.4 if narrow else 2.9, sharey=True)
    for ax, split in zip(axes, splits):
        ax.set(title=_TITLES[split], xlabel="blocks", ylabel=metric.axis_label)
        scale_by_size(ax, depths)
        for label, curve in curves.items():
            color, blocks = next(iter(curve.values())).color, list(curve)
            values = [list(group.results(f"{split}_{metric.key}").values()) for group in curve.values()]
            ax.fill_between(blocks, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15)
            ax.plot(blocks, list(map(statistics.fmean, values)), "o-", color=color, label=label, markersize=4)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(curves))
    return figure


def results_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """The result of every model, one row per model; None for fewer than three models, without results, or if models
    differ in data or length of training."""
    metric = result_metric(groups)
    if metric is None or len(groups) < 3 or not comparable(groups):
        return None
    rows = _rows(groups, metric, _splits(groups, metric))
    about = "Dots: single seeds. Diamonds: mean over seeds."
    return ReportFigure(
        "results",
        "All models",
        about,
        _results_caption(groups, metric),
        rows,
        lambda n: _draw_results(groups, metric, n),
    )


def _results_caption(groups: Sequence[Group], metric: Metric) -> str:
    def show(value: float) -> str:
        return number(value, metric.spec) + metric.unit

    means = [(statistics.fmean(group.results(f"val_{metric.key}").values()), group) for group in groups]
    (low, lowest), *_, (high, highest) = sorted(means, key=lambda pair: pair[0])
    return sentence(f"The means range from {show(low)} for {lowest.the} to {show(high)} for {highest.the}")


def _draw_results(groups: Sequence[Group], metric: Metric, narrow: bool) -> Figure:
    figure, (ax,) = make_panels(narrow, 1, 1, 0.5 + (0.26 if narrow else 0.22) * len(groups))
    ax.set(xlabel=f"validation {metric.axis_label}", ylim=(len(groups) - 0.5, -0.5))
    ax.set_yticks(range(len(groups)), [group.name for group in groups], fontsize=6.5 if narrow else 8)
    for row, group in enumerate(groups):
        seeds = list(group.results(f"val_{metric.key}").values())
        ax.plot(seeds, [row] * len(seeds), "o", color=group.color, markersize=3, alpha=0.45)
        ax.plot(statistics.fmean(seeds), row, "D", color=group.color, markersize=5)
    return figure


def _splits(groups: Sequence[Group], metric: Metric) -> list[str]:
    """The splits to draw; for training, the scores without augmentation if all models have them."""

    def is_there(split: str) -> bool:
        return all(group.results(f"{split}_{metric.key}") for group in groups)

    trained = [split for split in ("train_clean", "train") if is_there(split)]
    return [*trained[:1], *(["val"] if is_there("val") else [])]


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
