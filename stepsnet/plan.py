"""Widths and depths of a StepsNet: the √2 rule, the half-compute rule, and a search for a budget.

Sec. 4.1 sets C_i = C_{i+1}/√2, and Sec. 5.5 allocates half of each network's compute to a new,
narrower one in front of it: k blocks become 2k blocks that are √2 narrower and cost half as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .markdown import markdown_table

__all__ = ["StepPlan", "heads_for", "plan_steps", "render_plan"]

# 1, 2, 3, 4, 6, 8, 12, 16, 24, …: every number of heads in Tables 13 and 14 is among them
USUAL_HEADS = sorted({2**i for i in range(12)} | {3 * 2**i for i in range(11)})


@dataclass(frozen=True)
class StepPlan:
    """Widths and depths of a stack of Transformer blocks, narrowest step first.

    Counts are of the blocks alone (the embedding and the head are the baseline's), by the paper's
    conventions: five layers a block, and multiply-accumulates with 5 per element of a LayerNorm.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: float = 4.0

    def __str__(self) -> str:
        return ", ".join(f"{width}×{depth}" for width, depth in zip(self.widths, self.depths))

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple(width // heads for width, heads in zip(self.widths, self.num_heads))

    @property
    def blocks(self) -> int:
        return sum(self.depths)

    @property
    def layers(self) -> int:
        return 5 * self.blocks

    @property
    def params(self) -> int:
        return sum(self.step_params)

    @property
    def step_params(self) -> tuple[int, ...]:
        return tuple(d * block_params(w, self.mlp_ratio) for w, d in zip(self.widths, self.depths))

    def macs(self, tokens: int) -> int:
        """Multiply-accumulates of the blocks for one sequence of ``tokens`` tokens."""
        return sum(self.step_macs(tokens))

    def as_dict(self, tokens: int) -> dict[str, Any]:
        counts = {"blocks": self.blocks, "layers": self.layers, "params": self.params, "macs": self.macs(tokens)}
        return {"widths": self.widths, "depths": self.depths, "num_heads": self.num_heads, **counts}

    def step_macs(self, tokens: int) -> tuple[int, ...]:
        return tuple(d * block_macs(w, tokens, self.mlp_ratio) for w, d in zip(self.widths, self.depths))


def block_params(width: int, mlp_ratio: float = 4.0) -> int:
    """Parameters of a pre-norm Transformer block with biases: 12C² + 13C at the usual MLP ratio of 4."""
    hidden = int(width * mlp_ratio)
    return 4 * width**2 + 4 * width + 2 * width * hidden + hidden + width + 4 * width


def block_macs(width: int, tokens: int, mlp_ratio: float = 4.0) -> int:
    """Eq. (3): 12NC² + 2N²C at the usual MLP ratio of 4, and 5NC for each of the two LayerNorms."""
    hidden = int(width * mlp_ratio)
    return tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width + 2 * 5 * tokens * width


def plan_steps(
    width: int,
    depth: int,
    steps: int = 3,
    *,
    blocks: int | None = None,
    macs: float | None = None,
    head_dim: int = 64,
    round_to: Literal["heads"] | int = "heads",
    mlp_ratio: float = 4.0,
    tokens: int = 197,
) -> StepPlan:
    """Plan a StepsNet for the residual network of ``depth`` blocks of ``width``.

    Without ``blocks`` and ``macs`` this is the half-compute rule: (384, 12) with 1 to 5 steps gives the
    rows of Table 8. A depth that halves to a fraction keeps the larger part at full width, and the
    compute stays the same.

    Args:
        width: C, the width of the last step and of the residual stream.
        depth: blocks of the residual network whose compute the plan matches.
        steps: n, the number of widths.
        blocks: total number of blocks to reach at the same compute (Table 9: 14, 18, 24, 30, 34).
        macs: compute of all blocks together for one sequence, in place of that of the residual network.
        head_dim: the attention head size to stay near to: 64 as in DeiT, 32 as in Swin.
        round_to: "heads" rounds W/√2ᵏ as the paper does, to a multiple of its number of heads;
            a number rounds to a multiple of it (8, 16 or 64 suit hardware better).
        mlp_ratio: hidden width of the MLP over the block's width.
        tokens: sequence length at which compute is matched, where it is searched for.

    Raises:
        ValueError: a number that is not positive, more steps than the depth or width can hold, or a
            number of blocks out of reach.
    """
    for name, value in dict(width=width, depth=depth, steps=steps, head_dim=head_dim, tokens=tokens).items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    if blocks is not None and not isinstance(blocks, int):
        raise ValueError(f"blocks: got {blocks}, expected a whole number")
    if round_to != "heads" and not (isinstance(round_to, int) and round_to > 0):
        raise ValueError(f"round_to: got {round_to!r}, expected 'heads' or a positive whole number")
    widths, heads = _step_widths(width, steps, head_dim, round_to)
    if blocks is None and macs is None:
        depths = _half_compute(depth, steps)
    else:
        if macs is None:
            # the C² law that the paper allocates by; attention's N²C makes deeper plans cost a little more
            costs, budget = [2.0 ** (i - steps + 1) for i in range(steps)], float(depth)
        else:
            costs, budget = [block_macs(w, tokens, mlp_ratio) for w in widths], macs
        depths = _search(costs, budget, blocks)
    return StepPlan(widths, depths, heads, mlp_ratio)


def heads_for(width: int, head_dim: int) -> int:
    """The usual number of heads that divides ``width`` and gives a head size nearest to ``head_dim``.

    Of two head sizes equally near, the smaller one. Gives every printed pair of Tables 13 and 14.
    """
    divisors = (heads for heads in USUAL_HEADS if width % heads == 0)
    return min(divisors, key=lambda heads: (abs(width / heads - head_dim), -heads))


def _step_widths(
    width: int, steps: int, head_dim: int, round_to: Literal["heads"] | int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths √2 apart, narrowest first, and the number of heads of each."""
    widths = [width]
    for k in range(1, steps):
        exact = width / math.sqrt(2) ** k
        unit = round_to if isinstance(round_to, int) else _usual_heads(exact / head_dim)
        widths.append(unit * round(exact / unit))
    widths.reverse()
    if widths[0] < 1 or widths != sorted(set(widths)):
        raise ValueError(f"steps: got {steps}, too many for width {width}: they would be {widths} wide")
    return tuple(widths), tuple(heads_for(w, head_dim) for w in widths)


def _usual_heads(exact: float) -> int:
    return min(USUAL_HEADS, key=lambda heads: (abs(heads - exact), -heads))


def _half_compute(depth: int, steps: int) -> tuple[int, ...]:
    """(D) -> (2k, D - k) with k = D/2; from there on half of 2k blocks is a whole number again."""
    half = depth // 2
    if steps == 1:
        return (depth,)
    if half == 0:
        raise ValueError(f"depth: got {depth}, expected at least 2 blocks to share among {steps} steps")
    return (2 * half, *[half] * (steps - 2), depth - half)


def _search(costs: Sequence[float], budget: float, blocks: int | None) -> tuple[int, ...]:
    """The whole depths near to (2j, j, …, j, D - j) that best meet the budget, and the blocks if given.

    By the C² law that family has the compute of D full-width blocks for every j, and D + (n - 1)j
    blocks: j = D/2 is the half-compute rule, and Table 9 walks along j.
    """
    n, full = len(costs), budget / costs[-1]  # full is D, not necessarily whole
    if full < 0.5:
        raise ValueError(f"macs: got {budget:,.0f}, expected at least one full-width block, {costs[-1]:,}")
    if n == 1:
        if blocks not in (None, round(full)):
            raise ValueError(f"blocks: got {blocks}, expected {round(full)} of one width at this compute")
        return (round(full),)
    moved = full / 2 if blocks is None else (blocks - full) / (n - 1)
    if not 0 <= round(moved, 1) <= full:
        raise ValueError(f"blocks: got {blocks}, expected {math.ceil(full)} to {math.floor(n * full)} at this compute")
    target = [2 * moved, *[moved] * (n - 2), full - moved]
    spread = 2 if n <= 5 else 1 if n <= 8 else 0  # keeps the grid below some 100,000 points
    choices = [range(max(0, math.floor(t) - spread), math.ceil(t) + spread + 1) for t in target]

    def misfit(depths: tuple[int, ...]) -> tuple[float, ...]:
        error = abs(sum(d * c for d, c in zip(depths, costs)) / budget - 1)
        # errors within the same half percent are alike: then the shape decides
        return round(200 * error), sum((d - t) ** 2 for d, t in zip(depths, target)), error

    candidates = (d for d in itertools.product(*choices) if blocks is None or sum(d) == blocks)
    return min(candidates, key=misfit)


def render_plan(plan: StepPlan, base: StepPlan, tokens: int) -> str:
    """A plan as a Markdown table, a row a step, held against its 1-step network."""
    headers = ["step", "width", "heads × size", "blocks", "layers", "params (M)", "MACs (G)"]

    def row(name: str, width, heads, blocks: int, params: float, macs: float) -> list:
        return [name, width, heads, blocks, 5 * blocks, f"{params / 1e6:.2f}", f"{macs / 1e9:.3f}"]

    rows = []
    steps = zip(plan.widths, plan.num_heads, plan.head_dims, plan.depths, plan.step_params, plan.step_macs(tokens))
    for number, (width, heads, size, depth, params, macs) in enumerate(steps, 1):
        rows.append(row(f"F_{number}", width, f"{heads} × {size}", depth, params, macs))
    rows.append(row("all steps", plan.widths[-1], "", plan.blocks, plan.params, plan.macs(tokens)))
    rows.append(row(f"1 step, {base}", base.widths[0], "", base.blocks, base.params, base.macs(tokens)))
    ratios = [
        f"{plan.blocks / base.blocks:.2f}×",
        f"{plan.layers / base.layers:.2f}×",
        f"{plan.params / base.params:.3f}×",
        f"{plan.macs(tokens) / base.macs(tokens):.3f}×",
    ]
    rows.append(["ratio", "", "", *ratios])
    title = f"{plan}    (blocks alone, {tokens} tokens; MACs are multiply-accumulates)"
    return f"{title}\n\n{markdown_table(headers, rows, 'lrrrrrr')}"
