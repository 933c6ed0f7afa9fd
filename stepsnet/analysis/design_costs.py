"""What the designs of the residual stream and StepsNets cost, beside a plain stream of about the same compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..macs import count_forward
from ..plan import Profile, plan_steps
from ..residual import DESIGNS, Connection, design_of
from .memory import activation_bytes

__all__ = ["DesignCost", "design_costs", "profile_costs", "stream_traffic"]


@dataclass(frozen=True)
class DesignCost:
    """The costs of a design in a DeiT of one width, or of a DeiT of several widths.

    Args:
        blocks: the number of blocks of the model.
        params, macs: of the whole model, per image. By the convention of :func:`stepsnet.macs.count_forward`, MACs
            leave out elementwise products and include 5 per element of an affine LayerNorm.
        traffic: numbers read and written between the branches, per token and block, in units of the stream's width C;
            with several widths the mean over the blocks. None if the design does not say.
        activations: peak bytes of a forward and backward pass of one image in float32, with nothing recomputed.
    """

    name: str
    title: str
    source: str
    options: dict[str, Any]
    starts_as_plain: bool
    blocks: int
    params: int
    macs: int
    traffic: float | None
    activations: int


def design_costs(
    width: int = 384, blocks: int = 12, num_heads: int = 6, names: Iterable[str] | None = None
) -> Iterator[DesignCost]:
    """Yield the costs of every design with its default options, "plain" first; by default in DeiT-S on 224×224 images.

    Args:
        names: the designs to include; by default all.

    Raises:
        UserError: an unknown name, or a design whose attributes are missing or invalid.
    """
    for name, design in [(name, design_of(name)) for name in names or DESIGNS]:
        yield DesignCost(
            name,
            "the sum of the stream and each branch" if design is None else design.title,
            "arXiv 1603.05027, Eq. 3" if design is None else design.source,
            {} if design is None else dict(design.options),
            design is None or design.starts_as_plain,
            blocks,
            traffic=stream_traffic([width], [blocks], name),
            **_counts(_model(name, [width], [blocks], [num_heads])),
        )


_PROFILES: tuple[tuple[Profile, str, str], ...] = (
    ("steps", "blocks read and write the first channels: ever more of them", "arXiv 2511.14329, Eq. 5"),
    ("reverse", "ever fewer of them", "arXiv 2511.14329, Eq. 6"),
    ("bowtie", "fewer in the middle", "arXiv 2606.18246"),
)


def profile_costs() -> Iterator[DesignCost]:
    """Yield the costs of a StepsNet of three steps in each profile, with DeiT-S's compute by the half-compute rule."""
    for profile, title, source in _PROFILES:
        plan = plan_steps(384, 12, 3, profile=profile, head_dim=64)
        yield DesignCost(
            f"StepsNet, {profile}",
            title,
            source,
            {"widths": list(plan.widths), "depths": list(plan.depths)},
            False,
            sum(plan.depths),
            traffic=stream_traffic(plan.widths, plan.depths),
            **_counts(_model("plain", plan.widths, plan.depths, plan.num_heads)),
        )


def stream_traffic(
    widths: Sequence[int], depths: Sequence[int], name: str = "plain", options: Mapping[str, Any] | None = None
) -> float | None:
    """Numbers read and written between the branches, per token and block, in units of the stream's width.

    These are the design's traffic at the width of each step, and that of joining channels wherever a wider part of the
    stream follows. None if the design does not say.
    """
    design = design_of(name) or Connection
    chosen, per_block = {**design.options, **(options or {})}, 1 if design.unit != "branch" else 2
    blocks = 0.0
    for width, depth in zip(widths, depths):
        of_blocks = design.traffic(per_block * depth, chosen) if depth else 0.0
        if of_blocks is None:
            return None
        blocks += width * depth * of_blocks
    joined = sum(2 * wider for width, wider in zip(widths, (*widths[1:], max(widths))) if wider > width)
    return (blocks + joined) / max(widths) / sum(depths)


def _counts(model: nn.Module) -> dict[str, int]:
    macs, _ = count_forward(model, torch.empty(1, 3, 224, 224, device="meta"))
    params = sum(parameter.numel() for parameter in model.parameters())
    return {"params": params, "macs": macs, "activations": activation_bytes(model, (3, 224, 224), 1)}


def _model(name: str, widths: Sequence[int], depths: Sequence[int], num_heads: Sequence[int]) -> nn.Module:
    import timm

    shape: dict[str, Any] = dict(widths=widths, depths=depths, num_heads=num_heads)
    with torch.device("meta"):
        return timm.create_model("steps_deit_small_patch16_224", residual=name, **shape)
