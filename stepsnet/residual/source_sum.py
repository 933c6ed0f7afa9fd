"""Sums over the outputs of all blocks before, as several designs take them: a few sources at a time.

The number of sources grows from block to block, and ``torch.compile`` makes a kernel for each. Here a kernel takes at
most nine sources, those of Attention Residuals in 8 groups, and goes on from the total of those before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .design import DesignPart

__all__ = ["SourceSum"]

AT_ONCE = 9


class SourceSum(DesignPart):
    """What sums over many sources by :meth:`add`, a function of tensors alone."""

    # (add, number of sources) -> add as compiled; set by models.compilation.compile_blocks
    compiled: Callable[[Callable[..., Any], int], Callable[..., Any]] | None = None

    @staticmethod
    def add(total: Any, sources: tuple[Tensor, ...], *weights: Tensor) -> Any:
        """The total and some sources more; a total of None is that of no source."""
        raise NotImplementedError

    def sum_up(self, sources: Sequence[Tensor], each: Sequence[Tensor] = (), all: Sequence[Tensor] = ()) -> Any:
        """The total of all sources; ``add`` gets the weights of its sources, and then those that are of all.

        Args:
            sources: of (B, N, C).
            each: weights whose first dimension is that of the sources.
            all: weights that are the same for all.
        """
        total = None
        for at in _groups(len(sources)):
            add, some = self.add, tuple(sources[at])
            if self.compiled is not None and not torch.compiler.is_compiling():
                add = self.compiled(add, len(some))
            total = add(total, some, *(weights[at] for weights in each), *all)
        return total


def _groups(count: int) -> Iterator[slice]:
    """The first group has what is left over, so that all that go on from a total are of one size."""
    end = (count - 1) % AT_ONCE + 1
    yield slice(0, end)
    for begin in range(end, count, AT_ONCE):
        yield slice(begin, begin + AT_ONCE)
