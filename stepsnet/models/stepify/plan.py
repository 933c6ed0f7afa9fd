"""The widths, heads and depths that replace a container's blocks, chosen by the measured cost of its own block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import UserError, in_a_line
from ...macs import OF_MODULES
from ...plan import (
    Profile,
    StepPlan,
    arrange_steps,
    check_steps,
    even_heads_of,
    heads_for,
    per_block,
    search_depths,
    step_widths,
)
from .adapters import rebuilt
from .containers import Container

__all__ = [
    "ContainerPlan",
    "Match",
    "check_container_heads",
    "check_plan",
    "check_round_to",
    "given_plans",
    "heads_at",
    "read_plan",
    "search_plan",
]

Match = Literal["macs", "params"]
_TOLERANCE = 0.04  # of the cost; within it, the rule of Sec. 5.5 decides: half of a step's cost goes to a narrower one


@dataclass(frozen=True)
class ContainerPlan:
    """Widths, depths and heads of a container's steps in the order of execution; None for blocks without heads."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    num_heads: tuple[int | None, ...]

    def is_of(self, container: Container) -> bool:
        """Whether it leaves a container as it is. Heads need no check: the widest step always has the model's own."""
        return (self.widths, self.depths) == ((container.width,), (container.depth,))

    @property
    def shapes(self) -> list[tuple[int, int | None]]:
        """(width, heads) of each block."""
        return per_block(list(zip(self.widths, self.num_heads)), self.depths)


def search_plan(
    container: Container,
    steps: int,
    profile: Profile,
    match: Match,
    blocks: int | None,
    round_to: Literal["heads"] | int,
) -> ContainerPlan:
    """The profile's widths, √2 apart, and the depths that meet the container's own cost.

    Raises:
        UserError: more steps than the width or the depth can hold, or a number of blocks out of reach.
    """
    where = f"{container.path or 'the model'}, {container.depth} blocks of width {container.width}"
    try:
        if steps == 1 and blocks in (None, container.depth):
            return ContainerPlan((container.width,), (container.depth,), (heads_at(container, container.width),))
        different = _widths(container, steps, profile, round_to)
        costs = [_cost(container, width, heads_at(container, width), match) for width in different]
        least = 1 if blocks is None else 0
        given = container.depth * costs[-1]
        if blocks is None and sum(costs) > (1 + _TOLERANCE) * given:
            raise ValueError(
                f"steps: got {steps}, but one block in each costs {sum(costs) / given:.2f} times as much as the "
                "original blocks, expected fewer steps, or a plan"
            )
        found = search_depths(costs, given, blocks, least, _TOLERANCE)
        widths, depths = arrange_steps(different, found, profile)
    except ValueError as error:
        raise UserError(f"stepify: {where}: {error}") from None
    return ContainerPlan(widths, depths, tuple(heads_at(container, width) for width in widths))


def given_plans(plan: Mapping[str, Any] | StepPlan, chosen: Sequence[Container]) -> dict[str, ContainerPlan]:
    """The user's plan for each container, by its path.

    Raises:
        UserError: an unknown key, or a plan that does not fit.
    """
    has_heads = any(container.adapter.num_heads(container.template) is not None for container in chosen)
    if isinstance(plan, StepPlan) and not has_heads:  # a StepPlan always has heads
        plan = {"widths": plan.widths, "depths": plan.depths}
    plan = _fields_of(plan)
    keys = ("widths", "depths", "num_heads")
    values = zip(*(_per_container(plan.get(key), key, chosen) for key in keys))
    return {container.path: _given_plan(container, *one) for container, one in zip(chosen, values)}


def check_plan(plan: Any) -> None:
    """Raises UserError unless it is None or can be a user's plan: a mapping or a StepPlan."""
    if plan is not None and not isinstance(plan, (Mapping, StepPlan)):
        raise UserError(f"plan: got {str(plan)[:40]}, expected widths and depths, or what plan_steps returns")


def check_round_to(round_to: Any) -> None:
    """Raises UserError unless it is "heads" or a positive integer."""
    if round_to != "heads" and (not isinstance(round_to, int) or isinstance(round_to, bool) or round_to < 1):
        raise UserError(f"round_to: got {repr(round_to)[:40]}, expected 'heads' or a whole number of at least 1")


def read_plan(plan: Mapping[str, Any] | StepPlan) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """The widths, depths and, if given, heads of a user's plan for one container.

    Raises:
        UserError: an unknown key, a value that is not a list, or widths and depths that do not go together.
    """
    fields = _fields_of(plan)
    for key, value in fields.items():
        if not isinstance(value, (list, tuple)) and (key != "num_heads" or value is not None):
            raise UserError(f"plan: {key}: got {value!r}, expected a list")
    widths, depths, heads = tuple(fields["widths"]), tuple(fields["depths"]), fields.get("num_heads")
    try:
        check_steps(widths, depths)
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    return widths, depths, None if heads is None else tuple(heads)


def _fields_of(plan: Mapping[str, Any] | StepPlan) -> Mapping[str, Any]:
    """The widths, depths and maybe num_heads of a plan. Raises UserError for other keys."""
    if isinstance(plan, StepPlan):
        return {"widths": plan.widths, "depths": plan.depths, "num_heads": plan.num_heads}
    if not {"widths", "depths"} <= plan.keys() <= {"widths", "depths", "num_heads"}:
        got = ", ".join(map(str, plan)) or "nothing"
        raise UserError(f"plan: got {got}, expected widths and depths, and optionally num_heads")
    return plan


def _per_container(value: Any, name: str, chosen: Sequence[Container]) -> list[Any]:
    """One sequence per container; that of a single container may be given without outer brackets."""
    if value is None and name == "num_heads":
        return [None] * len(chosen)
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"plan: {name}: got {value!r}, expected a list")
    if len(chosen) == 1 and all(isinstance(one, int) for one in value):
        return [value]
    if len(value) != len(chosen) or any(isinstance(one, int) for one in value):
        places = ", ".join(container.path for container in chosen)
        raise UserError(f"plan: {name}: got {value}, expected {len(chosen)} lists, one for each of {places}")
    return list(value)


def _given_plan(
    container: Container, widths: Sequence[int], depths: Sequence[int], num_heads: Sequence[int] | None
) -> ContainerPlan:
    where = f"plan: {container.path or 'the model'}"
    try:
        check_steps(widths, depths)
        heads = [heads_at(container, width) for width in widths] if num_heads is None else num_heads
        check_container_heads(container, widths, heads)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not sum(depths):
        raise UserError(f"{where}: depths: got {tuple(depths)}, expected at least one block")
    if max(widths) != container.width:
        raise UserError(
            f"{where}: widths: got {tuple(widths)}, expected the widest to be the stream's {container.width}"
        )
    return ContainerPlan(tuple(widths), tuple(depths), tuple(heads))


def check_container_heads(container: Container, widths: Sequence[int], heads: Sequence[Any], known: int = 0) -> None:
    """Raises ValueError for heads that do not fit; the first ``known`` are those of an existing model, not checked."""
    if len(heads) != len(widths):
        raise ValueError(f"num_heads: got {tuple(heads)}, expected one per width of {tuple(widths)}")
    new = list(zip(widths, heads))[known:]
    for width, number in sorted(new, key=lambda pair: -pair[0]):  # the model's own width first, where head sizes show
        if expected := _expected_heads(container, width, number):
            raise ValueError(f"num_heads: got {number} at width {width}, expected {expected}")


def _expected_heads(container: Container, width: int, number: Any) -> str:
    """What a number of heads should have been; "" if it is right."""
    block, adapter = container.template, container.adapter
    if (own := adapter.num_heads(block)) is None:
        return "" if number is None else "none: these blocks have no heads"
    if width == container.width and number != own:  # with others the widest blocks would no longer be the model's
        return f"{own}, as in the model; plan_steps gives this number with head_dim={width // own}"
    rule, group = adapter.head_rule(block), adapter.kv_groups(block)
    if not isinstance(number, int) or number < 1 or number % group:
        return f"a positive multiple of {group}, the number of heads in a group" if group > 1 else "a positive number"
    if rule in ("divide", "even") and width % number:
        return "a divisor of the width"
    if rule == "even" and width // number % 2:
        return "a number that gives heads of even size, since rotary positions rotate pairs of channels"
    if rule == "multiple" and number != heads_at(container, width):
        return f"{heads_at(container, width)}, since the head size stays the same"
    return ""


def heads_at(container: Container, width: int) -> int | None:
    """The number of heads at a width, with a size near the block's own or, if the block's rule says so, just that size.

    Raises:
        ValueError: the width is not a multiple of a head size that has to stay, or no number of heads has an even size.
    """
    block, adapter = container.template, container.adapter
    own = adapter.num_heads(block)
    if own is None or width == container.width:
        return own
    rule = adapter.head_rule(block)
    size = adapter.head_size(block) if adapter.head_size else container.width // own
    group = adapter.kv_groups(block)
    if rule == "divide":
        return heads_for(width, size)
    if rule == "even":
        if not (among := even_heads_of(width, group)):
            several = f", a multiple of {group} of them" if group > 1 else ""
            raise ValueError(f"widths: got {width}, expected a width that divides into heads of even size{several}")
        return heads_for(width, size, among)
    if rule == "multiple":
        if width % size:
            raise ValueError(
                f"widths: got {width}, expected a multiple of {size}, the head size, which {type(block).__name__} "
                "keeps for its positions"
            )
        return width // size
    return group * max(1, round(own * width / container.width / group))


def _widths(container: Container, steps: int, profile: Profile, round_to: Literal["heads"] | int) -> list[int]:
    block, adapter = container.template, container.adapter
    heads = adapter.num_heads(block)
    size = 1
    if heads is not None:
        size = adapter.head_size(block) if adapter.head_size else container.width // heads
    rule = adapter.head_rule(block) if heads is not None else "any"
    if rule == "divide":
        return step_widths(container.width, steps, profile, size, round_to)
    unit: int = round_to if round_to != "heads" else (8 if container.width >= 64 else 4)
    if rule == "multiple":
        unit = size if round_to == "heads" else math.lcm(size, unit)
        return _coarse_widths(container.width, steps, profile, unit)
    return step_widths(container.width, steps, profile, size, unit)


def _coarse_widths(width: int, steps: int, profile: Profile, unit: int) -> list[int]:
    """Like step_widths, in multiples of a coarse unit; if two would be the same, the narrower is the next one below."""
    exact = step_widths(width, steps, profile, 1, 1)[::-1]
    widths = [width]
    for one in exact[1:]:
        widths.append(min(unit * round(one / unit), (widths[-1] - 1) // unit * unit))
    if widths[-1] < 1:
        raise ValueError(f"steps: got {steps}, too many for width {width} in multiples of {unit}, the head size")
    return widths[::-1]


def _cost(container: Container, width: int, heads: int | None, match: Match) -> float:
    """Multiply-accumulates or parameters of one block, measured."""
    block: Any = container.template
    if width != container.width:
        block = rebuilt(container.adapter, block, width, heads, container.path)
    if match == "params":
        return sum(parameter.numel() for parameter in block.parameters())
    try:
        return container.call_at(width).macs(block)
    except OF_MODULES as error:
        reason = in_a_line(error)[:200]
        adapter, hint = container.adapter, ""
        beside = tree_leaves((container.call.args[1:], container.call.kwargs))
        if any(isinstance(value, Tensor) and container.width in value.shape for value in beside):
            hint = f"; what it gets besides the stream keeps its {container.width} channels, see docs/your-model.md"
        elif adapter.dim is None and adapter.initialize is None:  # one of the user's
            hint = f"; its channels are taken to be in dimension {container.dim}, dim= of register_block sets another"
        raise UserError(
            f"stepify: {container.path}: {type(block).__name__} does not run at width {width} with what the model "
            f"gives its blocks, such as positions for each head ({reason}){hint}"
        ) from error
