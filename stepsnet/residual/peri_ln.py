r"""Peri-LN: Kim et al., "Peri-LN: Revisiting Normalization Layer in the Transformer Architecture", arXiv 2502.02732.

    x_{l+1} = x_l + Norm(Layer_l(Norm(x_l)))

The norm behind is as the one in front was at its start. The paper may normalize the embedding too; that is the
model's, and left as it is, since the stream's start is to be the same in all designs. Stochastic depth and LayerScale
stay behind the norm; dropout that a library has put at the end of its attention or MLP, as in GPT-2, stays in front.
Parameters: those of a norm a branch. Traffic: that of the plain stream, the norm behind being fused with the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .branches import BranchParts
from .design import Branch, Connection, Place, reset_norm
from .known_blocks import check_no_norm_behind

__all__ = ["PeriLN"]


class PeriLN(Connection):
    title = "a norm in front of each layer and another behind it"
    source = "arXiv 2502.02732, Sec. 3"
    needs = ("norm",)

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        norm: Any = place.norm
        self.norm = copy.deepcopy(norm).requires_grad_()
        for hooks in (self.norm._forward_pre_hooks, self.norm._forward_hooks):
            hooks.clear()  # which are of the one in front
        self.init_weights()

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        check_no_norm_behind("peri_ln", block, parts)

    def init_weights(self) -> None:
        reset_norm(self.norm)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x, behind=self.norm)
