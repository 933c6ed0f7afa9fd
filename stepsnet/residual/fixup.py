r"""Fixup: Zhang et al., "Fixup Initialization: Residual Learning Without Normalization", arXiv 1901.09321, Sec. 3.

    x_{l+1} = x_l + a_l F_l(x_l), F without norms, with a learned number added in front of each linear layer

The number in front of the activation is the MLP's own bias, which the layers of LLaMA and Qwen do not have. Start: F's
last layer is 0, a = 1 and the added numbers are 0; the other layers follow Xavier's rule with biases of 0, scaled by
L^(-1/(2m - 2)) with L branches of m layers: in an MLP m = 2, so L^(-1/2); in an attention m = 4, so L^(-1/6) for
queries, keys and values, as in the authors' code. The gate of a gated MLP, which the authors do not have, counts as
parallel to the two layers and is not scaled. The classifier keeps its library's initialization; in Fixup it starts
at 0. The model's last norm stays, and so do norms inside a branch, such as those of queries and keys. In the authors'
Transformer, there is no number inside the attention, and no layer has a bias. Parameters: six numbers per block, minus
the norms. Traffic: as in the plain stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .branches import BranchParts
from .design import Branch, Connection, Place
from .linears import run_before_last, start_of
from .scales import Gain, Shift

__all__ = ["Fixup"]


class Fixup(Connection):
    title = "no norms; branches start at 0, their first layers scaled by depth"
    source = "arXiv 1901.09321, Sec. 3"
    scales_branches = True
    needs = ("norm", "linears")

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.branches = place.branches  # L
        self.shift, self.inner, self.gain = Shift(), Shift(), Gain(1.0)

    def init_weights(self) -> None:
        for number in (self.shift, self.inner, self.gain):
            number.reset_parameters()

    def init_branch(self, block: nn.Module, parts: BranchParts) -> None:
        if (weights := start_of(block, parts)) is None:
            return
        for weight in weights.gates:
            nn.init.xavier_uniform_(weight)
        layers = 4 if weights.queries_keys else 2  # m
        for weight in (*weights.queries_keys, weights.values):
            nn.init.xavier_uniform_(weight, gain=self.branches ** (-1 / (2 * layers - 2)))
        nn.init.zeros_(weights.last)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + self.gain(F(self.shift(x)))

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        return [parts.last]

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for index, one in enumerate(parts):
            block.set_submodule(one.norm, nn.Identity())
            run_before_last(block, index, one)
