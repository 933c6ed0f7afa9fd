"""Draw docs/figures/architecture.png: a plain residual network and a StepsNet of the same width and compute.

python docs/figures/architecture.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).parent
# Okabe and Ito's colours, told apart with any colour vision: one for each slice of the channels
SLICES = ("#0072B2", "#009E73", "#E69F00")
INK, GREY = "#222222", "#8a8a8a"
C1, C2, C = 0.5, 1 / math.sqrt(2), 1.0  # widths √2 apart, over C
EDGES = (0.0, C1, C2, C)
PITCH, BLOCK = 1.0, 0.56  # from block to block, and a block's extent
MARGIN = (PITCH - BLOCK) / 2
DEPTHS = (4, 2, 2)  # 4 plain blocks by the half-compute rule


def draw_band(axes: Axes, start: float, end: float, low: float, high: float, colour: str, alpha: float) -> None:
    axes.add_patch(Rectangle((start, low), end - start, high - low, facecolor=colour, alpha=alpha, linewidth=0))


def draw_slices(axes: Axes, end: float) -> None:
    """The residual stream: a band for each slice x_1, x_2, x_3, darker from the step on that takes it in."""
    taken_in = 0.0
    for low, high, colour, depth in zip(EDGES, EDGES[1:], SLICES, (0, *DEPTHS)):
        taken_in += depth * PITCH
        start = taken_in + MARGIN if depth else 0
        draw_band(axes, 0, start, low, high, colour, 0.13)
        draw_band(axes, start, end, low, high, colour, 0.38)
        axes.plot([0, end], [low, low], color="white", linewidth=1.2, zorder=2)


def draw_block(axes: Axes, x: float, width: float, name: str) -> None:
    """A block, as high as the channels that it reads and writes."""
    box = FancyBboxPatch(
        (x, 0.015),
        BLOCK,
        width - 0.03,
        boxstyle="round,pad=0,rounding_size=0.05",
        facecolor="white",
        edgecolor=INK,
        linewidth=1.3,
        zorder=3,
    )
    axes.add_patch(box)
    axes.text(x + BLOCK / 2, width / 2, name, ha="center", va="center", fontsize=9, color=INK, zorder=4)


def draw_blocks(axes: Axes, widths: list[float], end: float) -> None:
    for index, width in enumerate(widths):
        draw_block(axes, 2 * MARGIN + index * PITCH, width, f"$R_{index + 1}$")
    axes.annotate(
        "", (end + 0.35, C / 2), (end, C / 2), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.3}
    )


def finish(axes: Axes, title: str, low: float) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=9)
    axes.set_xlim(-1.3, 9.2)
    axes.set_ylim(low, 1.02)
    axes.axis("off")


def draw() -> plt.Figure:
    figure, (plain, steps) = plt.subplots(
        2, 1, figsize=(9.6, 5.7), layout="constrained", gridspec_kw={"height_ratios": [1.0, 1.33]}
    )

    end = 4 * PITCH + 2 * MARGIN
    draw_band(plain, 0, end, 0, C, GREY, 0.38)
    draw_blocks(plain, [C] * 4, end)
    plain.text(-0.12, C / 2, "$x$\n$C$ channels", ha="right", va="center", fontsize=10)
    plain.text(
        end + 0.55,
        C / 2,
        "Every block reads and writes\nall $C$ channels of the stream:\n$z \\leftarrow z + R(z)$",
        va="center",
        fontsize=10,
    )
    finish(plain, "Plain residual network: 4 blocks", -0.06)

    widths = [width for width, depth in zip((C1, C2, C), DEPTHS) for _ in range(depth)]
    end = len(widths) * PITCH + 2 * MARGIN
    draw_slices(steps, end)
    draw_blocks(steps, widths, end)
    for number, (low, high) in enumerate(pairwise(EDGES), 1):
        steps.text(-0.12, (low + high) / 2, f"$x_{number}$", ha="right", va="center", fontsize=11)
    steps.text(2.22, (C1 + C2) / 2, "$x_2$ waits, untouched", ha="center", va="center", fontsize=10)
    steps.text(3.2, (C2 + C) / 2, "$x_3$ waits, untouched", ha="center", va="center", fontsize=10)
    names = ("$C_1 = C/2$", "$C_2 = C/\\sqrt{2}$", "$C_3 = C$")
    start = 0.34
    for step, (depth, name) in enumerate(zip(DEPTHS, names), 1):
        stop = start + depth * PITCH - 0.24
        steps.plot([start, start, stop, stop], [-0.05, -0.08, -0.08, -0.05], color=GREY, linewidth=1.1)
        middle = (start + stop) / 2
        steps.text(middle, -0.19, f"step {step}: {name}", ha="center", va="baseline", fontsize=10)
        steps.text(middle, -0.28, f"{depth} blocks", ha="center", va="baseline", fontsize=10)
        start += depth * PITCH
    steps.text(end + 0.42, C / 2, "$y_3$", va="center", fontsize=11)
    steps.text(-0.12, -0.19, "channels read\nand written", ha="right", va="center", fontsize=9, color=INK)
    finish(steps, "StepsNet: 8 blocks, the same width $C$ and about the same compute", -0.33)
    return figure


def main() -> None:
    draw().savefig(FOLDER / "architecture.png", dpi=170, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
