r"""Peri-LN: Kim et al., "Peri-LN: Revisiting Normalization Layer in the Transformer Architecture", arXiv 2502.02732.

    x_{l+1} = x_l + Norm(Layer_l(Norm(x_l)))

The output norm is a copy of the norm in front, reset to its start values. The paper may also normalize the embedding;
here that is left to the model, so that the stream starts alike in all designs. Stochastic depth and LayerScale come
after the output norm; dropout that a library puts at the end of its attention or MLP, as in GPT-2, comes before it.
Parameters: one more norm per branch. Traffic: as in the plain stream, with the output norm fused with the sum.
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
            hooks.clear()  # those of the norm in front
        self.init_weights()

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        check_no_norm_behind("peri_ln", block, parts)

    def init_weights(self) -> None:
        reset_norm(self.norm)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x, behind=self.norm)
