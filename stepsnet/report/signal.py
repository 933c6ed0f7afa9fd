"""The picture of the residual stream's signal by depth, of several runs and checkpoints."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ..analysis.stream_signal import BlockSignal
from ..files import write_atomically
from .figures import STYLE
from .runs import COLOURS, DASHES

__all__ = ["SignalOf", "draw_signal"]

_PANELS = {  # title, axis
    "gamma": ("shortcut ratio, whole stream", "γ = σ₀ / σₗ"),
    "gamma_read": ("shortcut ratio, channels that the block reads", "γ = σ₀ / σₗ"),
    "branch": ("residual branch over its stream", "norm ratio"),
    "correlation": ("the stream and the input", "correlation of zₗ with z₀"),
    "gradient": ("gradient of the loss at each block", "norm"),
}
_LOGARITHMIC = ("branch", "gradient")


@dataclass(frozen=True)
class SignalOf:
    run: str
    step: int  # updates
    blocks: list[BlockSignal]


def draw_signal(signals: Sequence[SignalOf], out: Path) -> None:
    """Write ``signal.png``, ``signal.svg`` and ``signal.csv``: colours are runs, dashes are checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    names = [field.name for field in dataclasses.fields(BlockSignal)]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["run", "update", "block", *names])
    for signal in signals:
        for index, block in enumerate(signal.blocks, 1):
            writer.writerow([signal.run, signal.step, index, *dataclasses.astuple(block)])
    write_atomically(out / "signal.csv", table.getvalue())
    runs = list(dict.fromkeys(signal.run for signal in signals))
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(7.8, 8.2), layout="constrained")
        axes = list(figure.subplots(3, 2, squeeze=False).flat)
        axes[-1].set_visible(False)
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
                    color=COLOURS[runs.index(signal.run) % len(COLOURS)],
                    linewidth=1.5,
                    label=f"{signal.run}, update {signal.step}",
                )
            if name not in _LOGARITHMIC:
                ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        handles, labels = axes[0].get_legend_handles_labels()
        axes[-1].set_visible(True)
        axes[-1].axis("off")
        axes[-1].legend(handles, labels, loc="upper left")
        for kind in ("png", "svg"):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=150)
            write_atomically(out / f"signal.{kind}", content.getvalue())
