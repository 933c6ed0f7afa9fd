"""What a grown network starts with where there was nothing: channels like the trained, and blocks that add zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["drawn_like", "silence"]


@torch.no_grad()
def drawn_like(trained: Tensor, more: int, dim: int) -> Tensor:
    """The tensor with ``more`` entries behind its own along ``dim``, of a normal distribution as wide as its own."""
    shape = list(trained.shape)
    shape[dim] = more
    drawn = torch.randn(shape, dtype=trained.dtype, device=trained.device) * trained.std(correction=0)
    return torch.cat((trained, drawn), dim)


@torch.no_grad()
def silence(block: nn.Module, outputs: tuple[str, ...] | Any) -> None:
    """Let a block leave the stream as it is: zeros in the modules that make what it adds."""
    for path in outputs:
        for parameter in block.get_submodule(path).parameters(recurse=False):
            parameter.zero_()
