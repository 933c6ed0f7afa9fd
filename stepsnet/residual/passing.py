"""Connected blocks one by one, as functions of the stream: for code that loops over the blocks of a container."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..stream import recomputed
from .design import State, Wiring

__all__ = ["Passage", "PassingBlock"]


def _same(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to NaN; assumed if they have no values."""
    if x is other or x.is_meta or type(x) is not Tensor or torch.compiler.is_compiling():
        return True
    return x.shape == other.shape and torch.allclose(x, other, rtol=0, atol=0, equal_nan=True)


def _writes(x: Tensor) -> int:
    """How often a tensor has been changed in place; 0 if torch does not count."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Passage:
    """One pass over the blocks of an iterated container."""

    def __init__(self, wiring: Wiring):
        self.wiring = wiring
        self.state: State = None
        self.shown: Tensor | None = None  # what the last block has returned
        self.writes = 0  # in-place changes of that tensor when it was returned
        self.kept: Tensor | None = None  # a copy of that tensor, if torch does not count its changes
        self.begun: dict[int, tuple[Tensor, State]] = {}  # what each block began with, in case it is run again


class PassingBlock:
    """One block in a pass, as a function of the stream."""

    def __init__(self, passage: Passage, block: nn.Module, index: int, checkpointed: bool):
        self.passage, self.block, self.index, self.checkpointed = passage, block, index, checkpointed

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        one = self.passage
        run = partial(recomputed, self.block) if self.checkpointed else self.block
        if type(one.wiring) is Wiring:  # the state is the stream, whatever was done to it in between
            return one.wiring.end(run(x, *args, **kwargs))
        state = self._state_for(x)
        if torch.is_grad_enabled():  # timm may run the block again in the backward pass
            one.begun[self.index] = x, state
        one.state = run(state, *args, **kwargs)
        one.shown = one.wiring.end(one.state)
        one.writes = _writes(one.shown)
        one.kept = one.shown.clone() if not torch.compiler.is_compiling() and one.shown.is_inference() else None
        return one.shown

    def _state_for(self, x: Tensor) -> State:
        one = self.passage
        if self.index == 0:  # also in another pass on an equal stream, or when it is run again
            if not _in_backward():  # in which the other blocks may still be run again
                one.begun.clear()
            return one.wiring.start(x)
        if one.shown is None:
            raise RuntimeError(
                f"block {self.index} of a connected sequence: got a stream, but no block before it has run in this "
                f"loop, as if taken by its index, blocks[{self.index}]; the stream of this design is more than that "
                "tensor: run the container, or iterate over it, as in `for block in blocks`"
            )
        if self.index in one.begun and _same(x, one.begun[self.index][0]):  # run again, perhaps on another view of x
            return one.begun[self.index][1]
        if _same(x, one.shown) and one.writes == _writes(one.shown) and (one.kept is None or _same(x, one.kept)):
            return one.state
        raise RuntimeError(
            f"block {self.index} of a connected sequence: got a tensor other than the one that the previous block "
            "returned; the stream of this design is more than that tensor: run the container, or its blocks in order"
        )
