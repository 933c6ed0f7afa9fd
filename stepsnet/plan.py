"""Widths and depths of a StepsNet: the √2 rule, the half-compute rule, a search for a budget, and what is allowed.

Sec. 4.1 sets C_i = C_{i+1}/√2, and Sec. 5.5 allocates half of each network's compute to a new,
narrower one in front of it: k blocks become 2k blocks that are √2 narrower and cost half as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

__all__ = [
    "MOST_BLOCKS",
    "MOST_CHANNELS",
    "Profile",
    "StepPlan",
    "USUAL_HEADS",
    "arrange_steps",
    "check_heads",
    "check_steps",
    "check_widths",
    "even_heads_of",
    "heads_for",
    "per_block",
    "plan_steps",
    "search_depths",
    "step_widths",
    "steps_as_text",
    "steps_of",
    "usual_heads",
]

Profile = Literal["steps", "reverse", "bowtie"]

MOST_BLOCKS = 10_000  # in a network that is planned or built: a hundred times those of the paper's deepest
MOST_CHANNELS = 2**20
_MOST_WIDTHS = 2 * 20 + 1  # √2 apart
_VARIED = 8  # how many of the narrowest, and of the widest, widths a search for depths varies

# 1, 2, 3, 4, 6, 8, 12, 16, 24, …: every number of heads in Tables 13 and 14 is among them
USUAL_HEADS = sorted({2**i for i in range(12)} | {3 * 2**i for i in range(11)})


def per_block(values: Sequence, depths: Sequence[int]) -> list:
    """One value per step -> one value per block."""
    return [value for value, depth in zip(values, depths) for _ in range(depth)]


def steps_of(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(width, number of blocks) of each step, that is, of each group of consecutive blocks of equal width."""
    return [(width, len(list(blocks))) for width, blocks in itertools.groupby(widths)]


def steps_as_text(steps: Iterable[tuple[int, int]]) -> str:
    """Steps as width × number of blocks, such as ``24×13, 34×7``."""
    return ", ".join(f"{width}×{depth}" for width, depth in steps)


@dataclass(frozen=True)
class StepPlan:
    """Widths and depths of a stack of Transformer blocks, one entry per step in the order of execution.

    Counts cover the blocks alone (the embedding and the head are the baseline's), by the paper's
    conventions: five layers per block, and multiply-accumulates with 5 per element of a LayerNorm.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        check_steps(self.widths, self.depths)
        check_heads(self.widths, self.num_heads)

    def __str__(self) -> str:
        return steps_as_text(zip(self.widths, self.depths))

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
    profile: Profile = "steps",
    blocks: int | None = None,
    macs: float | None = None,
    head_dim: int = 64,
    round_to: Literal["heads"] | int = "heads",
    mlp_ratio: float = 4.0,
    tokens: int = 197,
) -> StepPlan:
    """Plan a StepsNet for the residual network of ``depth`` blocks of ``width``.

    Without ``blocks`` and ``macs`` this is the half-compute rule: (384, 12) with 1 to 5 steps gives the rows of
    Table 8. A depth that halves to a fraction keeps the larger part at full width, and the compute stays the same.

    The profiles arrange the same blocks in another order. The bow-tie of n steps has the blocks of the plan of
    (n + 1)/2 steps: the narrowest are its waist, and half of each wider step's blocks run before it, half after it
    (of an odd number, the larger half before it). "Variable-Width Transformers" (arXiv 2606.18246) has a profile of
    this shape, with its waist at about three quarters of the depth.

    Args:
        width: C, the width of the widest step and of the residual stream.
        depth: blocks of the residual network whose compute the plan matches.
        steps: n, the number of steps; odd for a bow-tie.
        profile: "steps" from narrow to wide, Eq. (5); "reverse" from wide to narrow, Eq. (6); "bowtie" from wide to
            narrow and back to wide.
        blocks: total number of blocks to reach at the same compute (Table 9: 14, 18, 24, 30, 34).
        macs: compute of all blocks together for one sequence, instead of that of the residual network.
        head_dim: the attention head size to stay close to: 64 as in DeiT, 32 as in Swin. The full width keeps exactly
            this size if it is a multiple of it.
        round_to: "heads" rounds W/√2ᵏ as the paper does, to a multiple of its number of heads;
            a number rounds to a multiple of it (8, 16 or 64 suit hardware better).
        mlp_ratio: hidden width of the MLP over the block's width.
        tokens: sequence length at which ``macs`` is matched.

    Raises:
        ValueError: a number that is not positive, not finite or beyond :data:`MOST_BLOCKS` and
            :data:`MOST_CHANNELS`, more steps than the depth or width can hold, or a number of blocks out of reach.
    """
    most = {"depth": MOST_BLOCKS, "blocks": MOST_BLOCKS, "tokens": 2**31}
    for name, value in dict(width=width, depth=depth, steps=steps, head_dim=head_dim, tokens=tokens).items():
        _check_count(name, value, most.get(name, MOST_CHANNELS))
    if blocks is not None:
        _check_count("blocks", blocks, MOST_BLOCKS)
    for name, number in dict(macs=macs, mlp_ratio=mlp_ratio).items():
        if number is not None and not (_is_number(number) and 0 < number < math.inf):
            raise ValueError(f"{name}: got {number}, expected a positive number")
    widths = step_widths(width, steps, profile, head_dim, round_to)
    num_widths = len(widths)
    if blocks is None and macs is None:
        depths = _half_compute(depth, num_widths)
    else:
        if macs is None:
            # the C² law that the paper allocates by; attention's N²C makes deeper plans cost a little more
            costs, budget = [2.0 ** (i - num_widths + 1) for i in range(num_widths)], float(depth)
        else:
            costs, budget = [block_macs(w, tokens, mlp_ratio) for w in widths], macs
        holds_all = macs is not None and blocks is None and macs >= sum(costs)  # then no step is empty
        depths = search_depths(costs, budget, blocks, least=int(holds_all))
    arranged_widths, arranged_depths = arrange_steps(widths, depths, profile)
    own = width // head_dim if width % head_dim == 0 else heads_for(width, head_dim)  # of the residual network
    heads = tuple(own if w == width else heads_for(w, head_dim) for w in arranged_widths)
    return StepPlan(arranged_widths, arranged_depths, heads, mlp_ratio)


def check_widths(widths: Sequence[int], where: str = "") -> None:
    """Raise a ValueError unless these are positive integers, in any order; ``where`` may be, say, " of stage 3"."""
    if not widths or not all(_is_integer(width, at_least=1) for width in widths):
        raise ValueError(f"widths{where}: got {tuple(widths)}, expected positive integers")
    if max(widths) > MOST_CHANNELS:
        raise ValueError(f"widths{where}: got {max(widths):,}, expected at most {MOST_CHANNELS:,}")


def check_steps(widths: Sequence[int], depths: Sequence[int], where: str = "") -> None:
    """The same for widths with their depths: one depth per width, 0 or more blocks."""
    check_widths(widths, where)
    if len(depths) != len(widths):
        raise ValueError(f"depths{where}: got {tuple(depths)}, expected one per width of {tuple(widths)}")
    if not all(_is_integer(depth, at_least=0) for depth in depths):
        raise ValueError(f"depths{where}: got {tuple(depths)}, expected integers of at least 0")
    if sum(depths) > MOST_BLOCKS:
        raise ValueError(f"depths{where}: got {sum(depths):,} blocks, expected at most {MOST_BLOCKS:,}")


def check_heads(widths: Sequence[int], num_heads: Sequence[int], where: str = "", name: str = "num_heads") -> None:
    """Raise a ValueError unless there is one number of attention heads per width, which divides it."""
    if len(num_heads) != len(widths):
        raise ValueError(f"{name}{where}: got {tuple(num_heads)}, expected one per width of {tuple(widths)}")
    for width, heads in zip(widths, num_heads):
        if not _is_integer(heads, at_least=1) or width % heads:
            raise ValueError(f"{name}{where}: got {heads}, expected a divisor of the width {width}")


def _check_count(name: str, value: object, most: int) -> None:
    if not _is_integer(value, at_least=1):
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
    if value > most:  # type: ignore[operator]
        raise ValueError(f"{name}: got {str(value)[:40]}, expected at most {most:,}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object, at_least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= at_least  # type: ignore[operator]


def heads_for(width: int, head_dim: int, among: Sequence[int] = USUAL_HEADS) -> int:
    """The number of heads, ``among`` the usual ones, that divides ``width`` into heads of about ``head_dim`` channels.

    The nearest size is taken; of two equally near, the smaller. This gives every printed pair of Tables 13 and 14.
    """
    divisors = (heads for heads in among if width % heads == 0)
    return min(divisors, key=lambda heads: (abs(width / heads - head_dim), -heads))


def even_heads_of(width: int, group: int = 1) -> list[int]:
    """The usual numbers of heads that divide ``width`` into heads of even size and are multiples of ``group``."""
    return [heads for heads in USUAL_HEADS if width % (2 * heads) == 0 and heads % group == 0]


def step_widths(
    width: int, steps: int, profile: Profile = "steps", head_dim: int = 64, round_to: Literal["heads"] | int = "heads"
) -> list[int]:
    """The different widths of a profile, √2 apart, narrowest first; arguments as for :func:`plan_steps`.

    Raises:
        ValueError: an unknown profile, or more steps than the width can hold.
    """
    if profile not in get_args(Profile):
        raise ValueError(f"profile: got {profile!r}, expected {', '.join(get_args(Profile))}")
    if round_to != "heads" and not (isinstance(round_to, int) and round_to > 0):
        raise ValueError(f"round_to: got {round_to!r}, expected 'heads' or a positive integer")
    if steps > 2 * _MOST_WIDTHS:
        raise ValueError(f"steps: got {steps}, too many for width {width}")
    if profile == "bowtie" and steps % 2 == 0:
        raise ValueError(f"steps: got {steps}, expected an odd number for a bow-tie")
    widths = [width]
    for k in range(1, (steps + 1) // 2 if profile == "bowtie" else steps):
        exact = width / math.sqrt(2) ** k
        unit = round_to if isinstance(round_to, int) else usual_heads(exact / head_dim)
        widths.append(unit * round(exact / unit))
    widths = widths[::-1]
    if widths[0] < 1 or widths != sorted(set(widths)):
        raise ValueError(f"steps: got {steps}, too many for width {width}: their widths would be {widths}")
    return widths


def arrange_steps(
    widths: Sequence[int], depths: Sequence[int], profile: Profile
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths and depths, narrowest first -> those of the profile, in the order of execution."""
    arranged_widths, arranged_depths = zip(*_arrange(list(zip(widths, depths)), profile))
    return arranged_widths, arranged_depths


def _arrange(steps: list[tuple[int, int]], profile: Profile) -> list[tuple[int, int]]:
    """Steps (width, depth), narrowest first -> the order of execution."""
    if profile == "reverse":
        return steps[::-1]
    if profile == "bowtie":
        waist, *wider = steps
        before = [(width, depth - depth // 2) for width, depth in wider]
        behind = [(width, depth // 2) for width, depth in wider]
        return [*before[::-1], waist, *behind]
    return steps


def usual_heads(exact: float) -> int:
    """The number of :data:`USUAL_HEADS` nearest to ``exact``."""
    return min(USUAL_HEADS, key=lambda heads: (abs(heads - exact), -heads))


def _half_compute(depth: int, num_widths: int) -> tuple[int, ...]:
    """(D) -> (2k, D - k) with k = D/2; from there on half of 2k blocks is an integer again."""
    half = depth // 2
    if num_widths == 1:
        return (depth,)
    if half == 0:
        raise ValueError(f"depth: got {depth}, expected at least 2 blocks for {num_widths} widths")
    return (2 * half, *[half] * (num_widths - 2), depth - half)


def search_depths(
    costs: Sequence[float], budget: float, blocks: int | None = None, least: int = 0, tolerance: float | None = None
) -> tuple[int, ...]:
    """The integer depths near (2j, j, …, j, D - j) that best meet the budget, and ``blocks`` if given.

    ``costs`` are those of one block of each width, narrowest first; each width gets at least ``least`` blocks.
    Errors below ``tolerance`` count as equal; without it, errors within the same half percent do.

    By the C² law, this family has the compute of D full-width blocks for every j, and D + (n - 1)j
    blocks: j = D/2 is the half-compute rule, and Table 9 walks along j.
    """
    n, full = len(costs), budget / costs[-1]  # full is D, not necessarily an integer
    if n * full > MOST_BLOCKS:
        raise ValueError(f"blocks: got compute for up to {n * full:.4g} of them, expected at most {MOST_BLOCKS:,}")
    if full < 0.5:
        raise ValueError(f"macs: got {budget:,.0f}, expected at least {costs[-1]:,}, those of one full-width block")
    if n == 1:
        if blocks not in (None, round(full)):
            raise ValueError(f"blocks: got {blocks}, expected {round(full)} of one width at this compute")
        return (round(full),)
    moved = full / 2 if blocks is None else (blocks - full) / (n - 1)
    if not 0 <= round(moved, 1) <= full:
        raise ValueError(f"blocks: got {blocks}, expected {math.ceil(full)} to {math.floor(n * full)} at this compute")
    target = [2 * moved, *[moved] * (n - 2), full - moved]
    margin = 2 if n <= 5 else 1 if n <= 8 else 0  # keeps the grid below some 100,000 points
    choices = [range(max(least, math.floor(t) - margin), max(least, math.ceil(t) + margin) + 1) for t in target]
    for i in range(_VARIED, n - _VARIED):  # of so many, those in the middle are rounded so that their sum is right
        rounded = max(least, round((i + 1) * moved) - round(i * moved))
        choices[i] = range(rounded, rounded + 1)

    def misfit(depths: tuple[int, ...]) -> tuple[float, ...]:
        error = abs(sum(d * c for d, c in zip(depths, costs)) / budget - 1)
        # among errors that count as equal, the distance from the target decides
        counted = round(200 * error) if tolerance is None else max(error, tolerance)
        return counted, sum((d - t) ** 2 for d, t in zip(depths, target)), error

    candidates = (d for d in itertools.product(*choices) if blocks is None or sum(d) == blocks)
    if (best := min(candidates, key=misfit, default=None)) is None:
        raise ValueError(f"blocks: got {blocks}, expected a number near {round(sum(target))} at this compute")
    return best
