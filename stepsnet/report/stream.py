"""The picture of the residual stream's signal by depth, of several runs and checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ..analysis.block_statistics import BlockStatistics, statistics_of
from .figures import STYLE, Picture, save_figure, write_csv
from .runs import COLOURS, DASHES, Group
from .words import join, number, sentence_of

__all__ = ["StreamOf", "draw_stream", "figure_signal"]

_PANELS = {  # title, axis
    "gamma": ("shortcut ratio, whole stream", "γ = σ₀ / σₗ"),
    "gamma_read": ("shortcut ratio, channels that the block reads", "γ = σ₀ / σₗ"),
    "branch": ("residual branch over its stream", "norm ratio"),
    "correlation": ("the stream and the input", "correlation of zₗ with z₀"),
    "gradient": ("gradient of the loss at each block", "norm"),
}
_LOGARITHMIC = ("branch", "gradient")


@dataclass(frozen=True)
class StreamOf:
    run: str
    step: int  # updates
    blocks: list[BlockStatistics]
    colour: str | None = None  # else one a run


def draw_stream(signals: Sequence[StreamOf], out: Path) -> None:
    """Write ``signal.png``, ``signal.svg`` and ``signal.csv``: colours are runs, dashes are checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    write_csv(_rows(signals), out / "signal.csv")
    with style.context(["default", STYLE]):
        save_figure(_draw(signals, narrow=False), out / "signal")


def figure_signal(groups: Sequence[Group]) -> Picture | None:
    """What the stream carried during training, of each model's first run; None where no run looked on."""
    signals = []
    for group in groups:
        run = next((run for run in group.counted if run.signals), None)
        steps = sorted(run.signals) if run else []
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            assert run is not None
            signals.append(StreamOf(group.name, step, statistics_of(run.signals[step]), group.colour))
    if not signals:
        return None
    last = {signal.run: signal for signal in signals}
    gammas = join(f"{number(signal.blocks[-1].gamma)} for {name}" for name, signal in last.items())
    ratios = join(
        f"{signal.blocks[0].gradient / signal.blocks[-1].gradient:.3g} for {name}" for name, signal in last.items()
    )
    about = (
        "What stream_interval recorded in the updates themselves, of the first run of each model: drawn through, the "
        "last one looked at; dashed, the first. Depth is counted in blocks over their number."
    )
    gradients = f"the gradient at the first block over that at the last is {ratios}"
    caption = sentence_of(f"At the last look γ after the last block is {gammas}", gradients)
    return Picture("signal", "The residual stream", about, caption, _rows(signals), lambda n: _draw(signals, n))


def _rows(signals: Sequence[StreamOf]) -> list[dict[str, Any]]:
    return [
        {"run": signal.run, "update": signal.step, "block": index, **dataclasses.asdict(block)}
        for signal in signals
        for index, block in enumerate(signal.blocks, 1)
    ]


def _draw(signals: Sequence[StreamOf], narrow: bool) -> Figure:
    runs = list(dict.fromkeys(signal.run for signal in signals))
    columns, rows = (1, 6) if narrow else (2, 3)
    figure = Figure(figsize=(3.7, 13.5) if narrow else (7.8, 8.2), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, (name, (title, axis)) in zip(axes, _PANELS.items()):
        ax.set(title=title, xlabel="depth (0: input, 1: output)", xlim=(0, 1), ylabel=axis)
        if name in _LOGARITHMIC:
            ax.set_yscale("log")
            ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            for formatted in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
                formatted(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.tick_params(which="minor", labelsize=6)
        for signal in signals:
            mine = [other.step for other in signals if other.run == signal.run]
            depth = [(index + 1) / len(signal.blocks) for index in range(len(signal.blocks))]
            ax.plot(
                depth,
                [getattr(block, name) for block in signal.blocks],
                DASHES[mine[::-1].index(signal.step) % len(DASHES)],  # the newest is drawn through
                color=signal.colour or COLOURS[runs.index(signal.run) % len(COLOURS)],
                linewidth=1.5,
                label=f"{signal.run}, update {signal.step}",
            )
        if name not in _LOGARITHMIC:
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, loc="upper left")
    return figure
