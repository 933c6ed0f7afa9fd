"""What the designs of the residual stream cost beside the plain one: parameters, MACs, traffic and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..macs import count_forward
from ..residual import DESIGNS, Connection
from .memory import activation_bytes

__all__ = ["DesignCost", "design_costs"]


@dataclass(frozen=True)
class DesignCost:
    """A design in a DeiT of one width.

    Args:
        params, macs: of the whole model, per image; elementwise products are not in the MACs, by the convention of
            :func:`stepsnet.macs.count_forward`.
        traffic: numbers read and written between the branches, per token and block, in units of the width C.
        activations: peak bytes of a forward and backward pass of one image in float32, with nothing recomputed.
    """

    name: str
    title: str
    source: str
    options: dict[str, Any]
    starts_as_plain: bool
    params: int
    macs: int
    traffic: float
    activations: int


def design_costs(width: int = 384, blocks: int = 12, num_heads: int = 6) -> Iterator[DesignCost]:
    """Every design with its default options, "plain" first: by default in DeiT-S on 224×224 images."""
    for name, design in DESIGNS.items():
        model = _model(name, width, blocks, num_heads)
        macs, _ = count_forward(model, torch.empty(1, 3, 224, 224, device="meta"))
        options: dict[str, Any] = {} if design is None else dict(design.options)
        chosen = design or Connection
        layers = blocks if chosen.unit == "block" else 2 * blocks
        yield DesignCost(
            name,
            "the sum of the stream and each branch" if design is None else design.title,
            "arXiv 1603.05027, Eq. 3" if design is None else design.source,
            options,
            design is None or design.starts_as_plain,
            sum(parameter.numel() for parameter in model.parameters()),
            macs,
            chosen.traffic(layers, options),
            activation_bytes(model, (3, 224, 224), 1),
        )


def _model(name: str, width: int, blocks: int, num_heads: int) -> nn.Module:
    import timm

    shape: dict[str, Any] = dict(widths=(width,), depths=(blocks,), num_heads=(num_heads,))
    with torch.device("meta"):
        return timm.create_model("steps_deit_small_patch16_224", residual=name, **shape)
