"""A norm of the residual stream by slices: each slice of the channels has a norm of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .stepify.roles import note_sizes

__all__ = ["SliceNorm", "norm_like", "widened_norm"]


class SliceNorm(nn.Module):
    """Separate norms for neighbouring slices of the channels, which are the last dimension.

    A norm over more channels divides by another number. With a norm per slice, the channels that were there before
    others were added are normalized as before.

    Args:
        parts: the norm of each slice.
        widths: the channels of each slice.

    Shape: (…, C) -> (…, C), C = sum(widths).
    """

    def __init__(self, parts: Iterable[nn.Module], widths: Sequence[int]):
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(str(index), part)  # not a ModuleList, which would be taken for one of blocks
        self.widths = list(widths)

    @property
    def parts(self) -> list[Any]:
        return list(self.children())

    @classmethod
    def like(cls, norm: nn.Module, widths: Sequence[int]) -> SliceNorm:
        """Make all norms of the same kind as ``norm``, with its options."""
        return cls([norm_like(norm, width) for width in widths], widths)

    def forward(self, x: Tensor) -> Tensor:
        slices = torch.split(x, self.widths, -1)
        return torch.cat([part(one) for part, one in zip(self.parts, slices)], -1)

    def extra_repr(self) -> str:
        return f"widths={tuple(self.widths)}"


def widened_norm(norm: nn.Module, width: int, more: int) -> SliceNorm:
    """Keep ``norm`` for its ``width`` channels, and add one like it for ``more`` channels after them.

    Raises:
        UserError: as for :func:`norm_like`.
    """
    if isinstance(norm, SliceNorm):
        parts, widths = [*norm.parts, norm_like(norm.parts[-1], more)], [*norm.widths, more]
    else:
        parts, widths = [norm, norm_like(norm, more)], [width, more]
    return SliceNorm(parts, widths).train(norm.training)


def norm_like(norm: Any, width: int) -> nn.Module:
    """A norm of the same kind and options for ``width`` channels; weights start at 1, biases at 0, all trainable.

    Raises:
        UserError: a norm with parameters that are not vectors, with buffers, or made up of other modules.
    """
    if next(norm.children(), None) or norm._buffers or any(p is not None and p.ndim != 1 for p in norm.parameters()):
        raise UserError(
            f"grow: got {type(norm).__name__}, expected a norm that holds only vectors of weights, such as LayerNorm "
            "or RMSNorm"
        )
    made = copy.deepcopy(norm)
    for name, old in norm._parameters.items():
        if old is not None:
            made._parameters[name] = nn.Parameter(old.new_full((width,), float(name == "weight")))
    if isinstance(getattr(made, "normalized_shape", None), tuple):
        made.normalized_shape = (width,)  # even a norm without weights has one
    note_sizes(made)
    return made
