"""The figure of what the residual stream carries by depth: γ, the branches, the correlation, the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ..analysis.block_statistics import StreamMeasurement, summarize
from ..output.colors import OKABE_ITO
from .figure import ReportFigure, in_style, make_panels, save_figure, write_csv
from .load_runs import LINESTYLES, Group
from .words import join, number, sentence

__all__ = ["LabelledMeasurement", "draw_stream", "stream_figure"]

_PANELS = {  # field of BlockStatistics: title, axis
    "gamma": ("γ of the whole stream", "σ₀ / σₗ"),
    "gamma_read": ("γ of the part that the block reads", "σ₀ / σₗ"),
    "branch": ("branch of the block over its input", "ratio of norms"),
    "correlation": ("stream and input", "correlation of zₗ with z₀"),
    "gradient": ("gradient of the loss after each block", "norm"),
}
_LOGARITHMIC = ("branch", "gradient")


@dataclass(frozen=True)
class LabelledMeasurement:
    """A measurement of a run, and the color of its curve; None takes one color per run."""

    run: str
    measured: StreamMeasurement
    color: str | None = None


def draw_stream(measurements: Sequence[LabelledMeasurement], out: Path) -> None:
    """Write ``stream.png``, ``stream.svg`` and ``stream.csv``: one color per run, one line style per update.

    With more updates than line styles, the styles repeat, fainter.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_csv(_rows(measurements), out / "stream.csv")
    with in_style():
        save_figure(_draw(measurements, narrow=False), out / "stream")


def stream_figure(groups: Sequence[Group]) -> ReportFigure | None:
    """The first and the last measurement in training, of each model's first run that has any; None if no run has."""
    measurements = []
    for group in groups:
        run = next((run for run in group.counted if run.stream_at_updates), None)
        steps = sorted(run.stream_at_updates) if run else []
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            assert run is not None
            measurements.append(LabelledMeasurement(group.name, run.stream_at_updates[step], group.color))
    if not measurements:
        return None
    about = (
        "Measured in training, at the updates that stream_interval sets, for the first run of each model. Solid: the "
        "last measurement; dashed: the first one. Depth is the number of the block over the number of blocks."
    )
    return ReportFigure(
        "stream",
        "Residual stream",
        about,
        _caption(measurements),
        _rows(measurements),
        lambda narrow: _draw(measurements, narrow),
    )


def _caption(measurements: Sequence[LabelledMeasurement]) -> str:
    last = {one.run: one.measured.blocks for one in measurements}

    def values(name: str) -> str:
        return join(f"{number(getattr(blocks[-1], name))} for {run}" for run, blocks in last.items())

    gradients = {run: summarize(blocks)["gradient_first_over_last"] for run, blocks in last.items()}
    ratios = [f"{ratio:.3g} for {run}" for run, ratio in gradients.items() if math.isfinite(ratio)]
    return sentence(
        f"At the last measurement, after the last block, γ of the whole stream is {values('gamma')}",
        f"γ of the part that the block reads is {values('gamma_read')}",
        f"the gradient after the first block over that after the last, each over the channels that the block reads, is "
        f"{join(ratios)}"
        if ratios
        else "",
    )


def _rows(measurements: Sequence[LabelledMeasurement]) -> list[dict[str, Any]]:
    return [
        {"run": one.run, "update": one.measured.step, "block": index, **dataclasses.asdict(block)}
        for one in measurements
        for index, block in enumerate(one.measured.blocks, 1)
    ]


def _draw(measurements: Sequence[LabelledMeasurement], narrow: bool) -> Figure:
    runs = list(dict.fromkeys(one.run for one in measurements))
    figure, axes = make_panels(narrow, len(_PANELS) + 1, 2, 2.2 if narrow else 2.6)
    for ax, (name, (title, axis)) in zip(axes, _PANELS.items()):
        ax.set(title=title, xlabel="depth (0: input, 1: output)", xlim=(0, 1), ylabel=axis)
        for one in measurements:
            steps = [other.measured.step for other in measurements if other.run == one.run]
            back = steps[::-1].index(one.measured.step)  # 0, which is solid: the last one
            values = one.measured.values(name)
            ax.plot(
                [(index + 1) / len(values) for index in range(len(values))],
                values,
                LINESTYLES[back % len(LINESTYLES)],
                alpha=1 / (1 + back // len(LINESTYLES)),
                color=one.color or OKABE_ITO[runs.index(one.run) % len(OKABE_ITO)],
                linewidth=1.5,
                label=f"{one.run}, update {one.measured.step}",
            )
        if all(math.isnan(value) for one in measurements for value in one.measured.values(name)):
            ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color="#5c6675")
        elif name in _LOGARITHMIC:
            _set_logarithmic(ax)
        else:
            low, high = ax.get_ylim()
            low = min(0.0, low)
            ax.set_ylim(low, high + 0.03 * (high - low))
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, loc="upper left")
    return figure


def _set_logarithmic(ax: Any) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.tick_params(which="minor", labelsize=6)
