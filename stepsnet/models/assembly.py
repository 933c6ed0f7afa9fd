"""What every family does alike: check widths, depths and heads, and put blocks into steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..plan import heads_for
from ..steps import ReverseStepsNet, StepsNet
from ..stream import StepSequence


def check_steps(widths: Sequence[int], depths: Sequence[int], where: str = "") -> None:
    """Raise a ValueError that names what is wrong with one stage's widths and depths."""
    if len(widths) != len(depths) or not widths:
        raise ValueError(f"depths{where}: got {len(depths)} {tuple(depths)}, expected one a width of {tuple(widths)}")
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"widths{where}: got {width!r}, expected positive whole numbers")
    if list(widths) != sorted(set(widths)):
        raise ValueError(f"widths{where}: got {tuple(widths)}, expected them strictly increasing")
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depths{where}: got {depth!r}, expected whole numbers from 0 up")


def check_stages(widths: Sequence[Sequence[int]], depths: Sequence[Sequence[int]], num_stages: int = 4) -> None:
    """The same for a hierarchical family, nested by stage."""
    for name, nested in (("widths", widths), ("depths", depths)):
        if len(nested) != num_stages or any(isinstance(stage, int) for stage in nested):
            raise ValueError(f"{name}: got {nested}, expected {num_stages} sequences, one a stage")
    for stage, (stage_widths, stage_depths) in enumerate(zip(widths, depths), 1):
        check_steps(stage_widths, stage_depths, f" of stage {stage}")


def resolve_heads(
    widths: Sequence[int], num_heads: Sequence[int] | None, head_dim: int, where: str = ""
) -> tuple[int, ...]:
    """Check the heads of each step, or choose them near to ``head_dim`` as the paper does."""
    if num_heads is None:
        return tuple(heads_for(width, head_dim) for width in widths)
    if len(num_heads) != len(widths):
        raise ValueError(f"num_heads{where}: got {tuple(num_heads)}, expected one a width of {tuple(widths)}")
    for width, heads in zip(widths, num_heads):
        if heads < 1 or width % heads:
            raise ValueError(f"num_heads{where}: got {heads}, expected a divisor of the width {width}")
    return tuple(num_heads)


def in_order(per_step: Sequence, reverse: bool) -> list:
    """Steps in the order of execution: narrow to wide, or wide to narrow in the reverse design."""
    return list(per_step)[::-1] if reverse else list(per_step)


def per_block(values: Sequence, depths: Sequence[int], reverse: bool = False) -> list:
    """One value a step -> one value a block, in the order of execution."""
    pairs = in_order(list(zip(values, depths)), reverse)
    return [value for value, depth in pairs for _ in range(depth)]


def assemble(
    blocks: Iterable[nn.Module], widths: Sequence[int], depths: Sequence[int], dim: int, reverse: bool = False
) -> StepsNet | ReverseStepsNet:
    """Blocks in the order of execution -> the container that runs them, one network a width."""
    remaining = iter(blocks)
    networks = [nn.Sequential(*(next(remaining) for _ in range(depth))) for depth in in_order(depths, reverse)]
    design = ReverseStepsNet if reverse else StepsNet
    return design(networks, in_order(widths, reverse), dim)


def with_defaults(architecture: dict, overrides: dict) -> dict:
    """An architecture of the paper with a caller's changes; new widths choose their heads anew."""
    if "widths" in overrides:
        overrides = {"num_heads": None, **overrides}
    merged = {**architecture, **overrides}
    if "widths" in overrides and "num_heads" not in architecture:
        merged.pop("num_heads")  # a family without attention
    return merged


def set_grad_checkpointing(model: nn.Module, enable: bool) -> None:
    """By the containers, so that a narrow block keeps its narrow input and not the whole stream."""
    for module in model.modules():
        if isinstance(module, StepSequence):
            module.set_grad_checkpointing(enable)


def model_cfg(first_conv: str, classifier: str, **kwargs) -> dict:
    """timm's ``default_cfg`` of a model without published weights, as the baselines evaluate."""
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
