r"""Value residual: Zhou et al., "Value Residual Learning" (ResFormer), arXiv 2410.17897, Sec. 3.

    V'_l = λ_{l,1} V_1 + λ_{l,2} V_l,   V_l = W^V_l norm(x_l)        V: (B, N, C), λ: numbers

All attentions but the first use V' in place of V, and a cache of keys and values holds V'. V_1 is that of the first
attention of the stream; in a StepsNet that of each step, since the widths differ. Start: both λ at 0.5, learned (the
paper's learnable ResFormer). Parameters: 2 per block except the first. Traffic: V_1 and V_l are read and V' is written
once per block except the first, which adds 3. Memory: V_1; in training also V_l of each block, for the gradient of λ,
and with it the queries and keys of a fused projection, since V_l is part of its output: 3 of (B, N, C) per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .branches import BranchParts, check_in_place
from .design import Branch, Connection, Place, Wiring

__all__ = ["ValueResidual"]


class _WithValues(Wiring):
    """State: (x,), and (V_1, x) after the first attention."""

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def may_be(self, state: Tensor) -> bool:
        return False

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[-1]


class ValueResidual(Connection):
    title = "the first attention's values in all later ones"
    source = "arXiv 2410.17897, Sec. 3"
    wiring = _WithValues
    needs = ("values",)

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        assert place.parts is not None
        self.is_attention = place.parts.values is not None
        # of V_1 and V_l; the first attention of the stream has only one of the two
        self.mix = nn.Parameter(torch.empty(2)) if self.is_attention and place.attention > 1 else None
        self.running = False  # whether the branch is; else someone calls the attention by itself
        self.first: Tensor | None = None  # V_1, while the branch runs
        self.made: Tensor | None = None  # V_l, once the attention has run
        self.init_weights()

    def init_weights(self) -> None:
        if self.mix is not None:
            nn.init.constant_(self.mix, 0.5)

    def forward(self, state: tuple[Tensor, ...], F: Branch) -> tuple[Tensor, ...]:
        *first, x = state
        if not self.is_attention:
            return (*first, x + F(x))
        try:
            self.first, self.running = first[0] if first else None, True
            x = x + F(x)
            made = self.made
        finally:  # a checkpoint aborts a pass that it recomputes once it has what it needs
            self.first, self.made, self.running = None, None, False
        if made is None:  # the attention has not run: its block is dropped, and the next one is the first
            return (*first, x)
        return (first[0] if first else made, x)

    def values(self, V: Tensor) -> Tensor:
        """V_l -> V'_l, called while the branch runs."""
        if not self.running:
            return V
        self.made = V
        return V if self.mix is None or self.first is None else self.mix[0] * self.first + self.mix[1] * V

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        if (count := sum(one.values is not None for one in parts)) > 1:  # such as cross-attention, to other tokens
            kind = type(block).__name__
            raise UserError(f"residual: value_residual: got {kind} with {count} attentions, expected one in each block")

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        return [parts.values[0]] if parts.values else []

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for index, one in enumerate(parts):
            if one.values is not None:
                block.get_submodule(one.values[0]).register_forward_hook(partial(_mix, block, index, *one.values))

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        return 9.0 - 6.0 / layers  # all of the layers / 2 attentions but the first mix


def _mix(
    block: Any, index: int, path: str, part: int, of: int, linear: nn.Module, arguments: Any, output: Tensor
) -> Tensor:
    """The output of the linear layer with V' in place of V: (B, N, C), or with queries and keys (B, N, 3C)."""
    check_in_place(block, path, linear)
    outputs = list(output.chunk(of, -1))
    outputs[part] = block.connections[index].values(outputs[part])
    return torch.cat(outputs, -1) if of > 1 else outputs[0]
