"""Sums over the outputs of all earlier blocks, as several designs take them.

The number of sources grows from block to block, and ``torch.compile`` makes a kernel for each number. So compiled sums
take at most nine sources at a time, as many as Attention Residuals in 8 groups have, and continue from the total of
those before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .design import DesignPart

__all__ = ["SourceSum", "Sources"]

AT_ONCE = 9
_PRECISE = (torch.float32, torch.float64)

Sources = tuple[Tensor, ...]  # of (B, N, C)


class SourceSum(DesignPart):
    """A module that sums over many sources by :meth:`add`."""

    widens: ClassVar[bool] = False  # whether ``add`` makes float32 copies of its sources that the gradient would keep
    # (function, its arguments) -> the function as compiled for them; set by models.compilation.compile_blocks
    compiled: Callable[..., Callable[..., Any]] | None = None

    @staticmethod
    def add(sources: Sources, total: Any, *weights: Tensor) -> Any:
        """Some sources and the total of those before them, None if there are none, -> the total of all.

        A static method, since it is a function of tensors alone: so all blocks share its compiled code.
        """
        raise NotImplementedError

    def sum_up(self, sources: Sequence[Tensor], each: Sequence[Tensor] = (), shared: Sequence[Tensor] = ()) -> Any:
        """The total of all sources.

        Args:
            each: weights whose first dimension is that of the sources; ``add`` gets those of its sources.
            shared: weights that are the same for all sources; ``add`` gets them after the others.
        """
        total = None
        for at in [slice(None)] if self.at_once(sources) else _groups(len(sources)):
            total = self.run(self.add, tuple(sources[at]), total, *(weights[at] for weights in each), *shared)
        return total

    def at_once(self, sources: Sequence[Tensor]) -> bool:
        """Whether all sources are summed at once."""
        return len(sources) <= AT_ONCE or not self._is_compiled()

    def run(self, function: Callable[..., Any], sources: Sources, *arguments: Any) -> Any:
        """Call a function of sources and other tensors, compiled if the model's blocks are."""
        if self._is_compiled():
            assert self.compiled is not None
            function = self.compiled(function, sources, *arguments)
        elif self.widens and sources[0].dtype not in _PRECISE and not torch.compiler.is_compiling():
            # each block would keep copies of all sources, the square of their number in total: they are made again
            return checkpoint(function, sources, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(sources, *arguments)

    def _is_compiled(self) -> bool:
        return self.compiled is not None and not torch.compiler.is_compiling()  # while compiling, it is part of a graph


def _groups(count: int) -> Iterator[slice]:
    """Slices of the sources. The first takes the remainder, so that all that continue from a total are of one size."""
    end = (count - 1) % AT_ONCE + 1
    yield slice(0, end)
    for begin in range(end, count, AT_ONCE):
        yield slice(begin, begin + AT_ONCE)
