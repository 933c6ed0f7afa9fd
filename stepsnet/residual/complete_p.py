r"""CompleteP: Dey et al., "Don't be lazy: CompleteP enables compute-efficient deep transformers", arXiv 2505.01618.

    x_{l+1} = x_l + (b / N) F_l(x_l)        N: blocks of the model, b: blocks at which the rate was chosen

This is the factor m_L^(-α) of Table 1 with α = 1. With α = 1, the paper keeps the learning rate of the hidden weights
the same over depths; its rules for widths, weight decay and Adam's ε are settings of a recipe and not part of this. An
initialization that a library scales by depth, as in GPT-2 or BEiT, is kept, and shrinks the branches further.
Parameters, traffic, memory: as in the plain network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..plan import MOST_BLOCKS
from .design import Branch, Connection, Place, check_bounds

__all__ = ["CompleteP"]


class CompleteP(Connection):
    title = "branches times 1/N in a network of N blocks"
    source = "arXiv 2505.01618, Table 1"
    options = {"base_blocks": 1}  # noqa: RUF012

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.factor = options["base_blocks"] / place.blocks

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + self.factor * F(x)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("complete_p", options, base_blocks=(1, MOST_BLOCKS))
