"""Start values for the new parts of a grown network: channels like the trained ones, and blocks that add zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["drawn_like", "silence"]


@torch.no_grad()
def drawn_like(trained: Tensor, more: int, dim: int) -> Tensor:
    """Append ``more`` entries along ``dim``, drawn from a normal distribution with the tensor's standard deviation."""
    shape = list(trained.shape)
    shape[dim] = more
    drawn = torch.randn(shape, dtype=trained.dtype, device=trained.device) * trained.std(correction=0)
    return torch.cat((trained, drawn), dim)


@torch.no_grad()
def silence(block: nn.Module, outputs: tuple[str, ...] | Any) -> None:
    """Make a block leave the stream as it is, by zeros in the modules that produce what it adds."""
    for path in outputs:
        for parameter in block.get_submodule(path).parameters(recurse=False):
            parameter.zero_()
