"""The figures of a grid of runs: a measure against the depth (Fig. 1), and the results of all models side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from .figures import Picture, axes_for, rows_of
from .runs import BASELINE, Group
from .words import RESULTS, join, number, sentence_of, spread

__all__ = ["figure_depth", "figure_results"]

SPLITS = {"train": "training", "val": "validation"}


def _measure(groups: Sequence[Group]) -> tuple[str, str, str] | None:
    """The first measure that all models have on the validation split: its key without the split, name and unit."""
    found = next((r for r in RESULTS if all(group.results(r[0]) for group in groups)), None)
    return (found[0].removeprefix("val_"), found[1].removeprefix("validation "), found[2].strip()) if found else None


def _splits(groups: Sequence[Group], key: str) -> list[str]:
    return [split for split in SPLITS if all(group.results(f"{split}_{key}") for group in groups)]


def figure_depth(groups: Sequence[Group]) -> Picture | None:
    """A measure against the number of blocks, as in Fig. 1.

    None unless every model has a result, no kind of model has two of one depth, and one has several depths. Models
    whose number of blocks is not known are left out.
    """
    measure = _measure(groups)
    placed = [(group.blocks, group) for group in groups if group.blocks]
    depths = sorted({blocks for blocks, _ in placed})
    curves: dict[str, dict[int, Group]] = {}
    for blocks, group in sorted(placed, key=lambda place: place[0]):
        curves.setdefault(group.label, {})[blocks] = group
    twice = sum(map(len, curves.values())) < len(placed)
    if measure is None or twice or max(map(len, curves.values()), default=0) < 2:
        return None
    key, what, unit = measure
    groups = [group for _, group in placed]
    splits = _splits(groups, key)

    def draw(narrow: bool) -> Figure:
        figure, axes = axes_for(narrow, len(splits), 2, 2.4 if narrow else 2.9, sharey=True)
        for ax, split in zip(axes, splits):
            ax.set(title=SPLITS[split], xlabel="blocks", ylabel=what + (f" ({unit})" if unit else ""), xscale="log")
            ax.set_xticks(depths)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.tick_params(axis="x", which="minor", length=0)
            for label, curve in curves.items():
                colour, blocks = next(iter(curve.values())).colour, list(curve)
                values = [list(group.results(f"{split}_{key}").values()) for group in curve.values()]
                ax.fill_between(blocks, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15)
                ax.plot(blocks, list(map(statistics.fmean, values)), "o-", color=colour, label=label, markersize=4)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(curves))
        return figure

    def at(end: Callable[..., int], named: Iterable[str]) -> str:
        ends = [(label, end(curves[label])) for label in named]
        return join(
            f"{spread(list(curves[label][blocks].results(f'val_{key}').values()), unit and f'{chr(160)}{unit}')} for "
            f"{_the(label)} at {blocks} block{'s' * (blocks > 1)}"
            for label, blocks in ends
        )

    several = [label for label, curve in curves.items() if len(curve) > 1]  # the others are said once
    caption = sentence_of(f"Validation {what} is {at(min, curves)}", at(max, several))
    about = "Points: the mean over seeds; the band reaches from the lowest to the highest seed."
    return Picture("depth", "Against the depth", about, caption, _rows(groups, key, splits), draw)


def figure_results(groups: Sequence[Group]) -> Picture | None:
    """Every model's result, a row a model; None for a few models, which the headline names, or without results."""
    measure = _measure(groups)
    if measure is None or len(groups) < 3:
        return None
    key, what, unit = measure
    values = [list(group.results(f"val_{key}").values()) for group in groups]

    def draw(narrow: bool) -> Figure:
        figure, (ax,) = axes_for(narrow, 1, 1, 0.5 + (0.26 if narrow else 0.22) * len(groups))
        ax.set(xlabel=f"validation {what}" + (f" ({unit})" if unit else ""), ylim=(len(groups) - 0.5, -0.5))
        ax.set_yticks(range(len(groups)), [group.name for group in groups], fontsize=6.5 if narrow else 8)
        for row, (group, seeds) in enumerate(zip(groups, values)):
            ax.plot(seeds, [row] * len(seeds), "o", color=group.colour, markersize=3, alpha=0.45)
            ax.plot(statistics.fmean(seeds), row, "D", color=group.colour, markersize=5)
        return figure

    ordered = sorted(zip(map(statistics.fmean, values), groups), key=lambda pair: pair[0])
    (low, least), *_, (high, most) = ordered
    said = f"The means go from {number(low)} for {least.the} to {number(high)} for {most.the}"
    about = "Small: single seeds; diamonds: the mean over seeds."
    rows = _rows(groups, key, _splits(groups, key))
    return Picture("results", "All models", about, sentence_of(said), rows, draw)


def _the(label: str) -> str:
    return f"the {label}" if label == BASELINE else label


def _rows(groups: Sequence[Group], key: str, splits: Sequence[str]) -> list[dict[str, Any]]:
    facts = ("blocks", "layers", "params", "macs")
    return rows_of(
        groups,
        lambda _, run: (
            [
                {"recipe": run.summary.get("recipe"), **{fact: run.summary.get(fact) for fact in facts}}
                | {split: run.value(f"{split}_{key}") for split in splits}
            ]
            if run.summary
            else []
        ),
    )
