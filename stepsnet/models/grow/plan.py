"""The widths, heads and depths of the new steps of a grown network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...errors import UserError
from ...plan import MOST_CHANNELS, StepPlan, usual_heads
from ..stepify.containers import Container
from ..stepify.plan import ContainerPlan, check_container_heads, heads_at, read_plan

__all__ = ["RoundTo", "plan_growth"]

_MOST_STEPS = 40  # √2 apart

RoundTo = Literal["heads"] | int


def plan_growth(
    container: Container,
    old: ContainerPlan,
    steps: int | None,
    plan: Mapping[str, Any] | StepPlan | None,
    round_to: RoundTo,
) -> ContainerPlan:
    """The plan of all steps, the old ones first.

    Without ``plan`` each new step is √2 wider than the one before, and has half as many blocks as the first step: its
    blocks together then cost as much as all steps in front of it. For a network of one width this is the allocation
    that :func:`stepsnet.plan_steps` gives the last width.

    Args:
        container: the blocks of the widest step, from which the new ones are made.

    Raises:
        UserError: no new step, an unknown key, or a plan that does not begin with the old steps or does not widen.
    """
    if plan is not None:
        if round_to != "heads":
            raise UserError(
                "round_to: got it together with a plan, which replaces the search, expected only one of them"
            )
        return _given(container, old, plan, steps)
    steps = len(old.widths) + 1 if steps is None else steps
    if steps <= len(old.widths):
        raise UserError(f"steps: got {steps}, expected more than the {len(old.widths)} that the model has")
    more = steps - len(old.widths)
    try:
        wider = _wider_widths(container, more, round_to)
        heads = [heads_at(container, width) for width in wider]
    except ValueError as error:
        raise UserError(f"grow: {error}") from None
    depth = max(1, old.depths[0] // 2)
    return ContainerPlan((*old.widths, *wider), (*old.depths, *[depth] * more), (*old.num_heads, *heads))


def _unit(container: Container, exact: float, round_to: RoundTo) -> int:
    """What the width of a new step is a multiple of: its number of heads or, if the heads' size stays, that size."""
    block, adapter = container.template, container.adapter
    if round_to != "heads":
        return round_to
    rule, size = adapter.head_rule(block), 1 if adapter.head_size is None else adapter.head_size(block)
    if rule in ("divide", "even"):
        return usual_heads(exact / size) * (2 if rule == "even" else 1)
    group = size * adapter.kv_groups(block)
    if adapter.num_heads(block) == container.width // size and container.width >= 2 * group:
        return group
    return 8 if container.width >= 64 else 4


def _wider_widths(container: Container, more: int, round_to: RoundTo) -> list[int]:
    """The ``more`` widths above the container's, √2 apart, each a multiple of its unit, narrowest first."""
    width = container.width
    widths = [width]
    for k in range(1, min(more, _MOST_STEPS) + 1):
        exact = width * math.sqrt(2) ** k
        unit = _unit(container, exact, round_to)
        widths.append(unit * round(exact / unit))
    if more > _MOST_STEPS or widths != sorted(set(widths)) or widths[-1] > MOST_CHANNELS:
        raise ValueError(
            f"steps: got {more} new ones, which do not fit above width {width}: widths would be {widths[1:6]}"
        )
    return widths[1:]


def _given(
    container: Container, old: ContainerPlan, plan: Mapping[str, Any] | StepPlan, steps: int | None
) -> ContainerPlan:
    widths, depths, heads = read_plan(plan)
    count = len(old.widths)
    try:
        _check_beginning(widths, old.widths, "widths")
        _check_beginning(depths, old.depths, "depths")
        wider = widths[count:]
        for before, width in zip((max(old.widths), *wider), wider):
            if width <= before:
                raise ValueError(f"widths: got {width} after {before}, expected a wider one: each new step is wider")
        if not wider or (steps is not None and steps != len(widths)):
            expected = f"{steps} steps" if steps is not None else "at least one more"
            raise ValueError(f"widths: got {widths}, expected {expected}; the first are the model's {old.widths}")
        if heads is None:
            return ContainerPlan(widths, depths, (*old.num_heads, *(heads_at(container, width) for width in wider)))
        _check_beginning(heads, old.num_heads, "num_heads")
        check_container_heads(container, widths, heads, count)
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    return ContainerPlan(widths, depths, heads)


def _check_beginning(given: Sequence[Any], old: Sequence[Any], name: str) -> None:
    if tuple(given[: len(old)]) != tuple(old):
        raise ValueError(f"{name}: got {tuple(given)}, expected the first to be the model's, {tuple(old)}")
