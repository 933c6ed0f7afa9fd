"""What all families share: checking arguments, choosing heads, and putting blocks into steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..plan import check_heads, check_steps, heads_for
from ..residual.joining import connect_steps
from ..steps import StepsNet


def check_stages(widths: Sequence[Sequence[int]], depths: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError unless widths and depths have four stages, each with positive widths and a depth for each."""
    check_nested("widths", widths, 4)
    check_nested("depths", depths, 4)
    for stage, (stage_widths, stage_depths) in enumerate(zip(widths, depths), 1):
        check_steps(stage_widths, stage_depths, f" of stage {stage}")


def check_nested(name: str, nested: Sequence[Sequence[int]], stages: int) -> None:
    """Raise a ValueError unless ``nested`` holds one sequence per stage."""
    if not isinstance(nested, Sequence) or len(nested) != stages or not all(isinstance(s, Sequence) for s in nested):
        raise ValueError(f"{name}: got {nested}, expected {stages} sequences, one per stage")


def resolve_heads(
    widths: Sequence[int], num_heads: Sequence[int] | None, head_dim: int, where: str = ""
) -> tuple[int, ...]:
    """Check the heads of each step or, if None, choose them for a head size near ``head_dim``, as the paper does."""
    if num_heads is None:
        return tuple(heads_for(width, head_dim) for width in widths)
    check_heads(widths, num_heads, where)
    return tuple(num_heads)


def assemble(
    blocks: Iterable[nn.Module],
    widths: Sequence[int],
    depths: Sequence[int],
    dim: int,
    residual: str = "plain",
    options: Mapping[str, Any] | None = None,
) -> StepsNet:
    """Put blocks, given in the order of execution, into the container that runs them, one network per width.

    Args:
        residual: the design of each step's stream, one of ``stepsnet.residual``.
        options: the design's options.
    """
    remaining = iter(blocks)
    groups = [[next(remaining) for _ in range(depth)] for depth in depths]
    return connect_steps(StepsNet([nn.Sequential(*group) for group in groups], widths, dim), residual, options or {})


def with_defaults(architecture: dict, overrides: dict) -> dict:
    """An architecture of the paper with a caller's changes; for new widths, the heads are chosen anew.

    Raises:
        ValueError: an argument in the form that timm's baselines take, one number for the whole model.
    """
    for name in ("embed_dim", "depth", "layers", "channels"):
        if name in overrides:
            raise ValueError(
                f"{name}: got {overrides[name]}, expected widths= and depths=, with an entry for each step"
            )
    for name in ("widths", "depths", "num_heads"):
        if isinstance(overrides.get(name), int | float | str):
            raise ValueError(f"{name}: got {overrides[name]!r}, expected a list with an entry for each step or stage")
    if "widths" in overrides and "num_heads" in architecture:
        overrides = {"num_heads": None, **overrides}
    return {**architecture, **overrides}


def set_grad_checkpointing(model: nn.Module, enable: bool) -> None:
    """timm's switch, set on each container, so that a narrow block keeps its narrow input, not the whole stream."""
    for module in model.modules():
        if isinstance(module, StepsNet):
            module.set_grad_checkpointing(enable)


def model_cfg(first_conv: str, classifier: str, **kwargs) -> dict:
    """timm's ``default_cfg`` for a model without published weights, with the evaluation settings of DeiT and Swin."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first_conv,
        "classifier": classifier,
        "license": "apache-2.0",
        **kwargs,
    }
