r"""ReZero: Bachlechner et al., "ReZero is All You Need", arXiv 2003.04887, Eq. 2.

    x_{l+1} = x_l + α_l F_l(x_l), without the norm in front of F        x, F(x): (B, N, C), α: one number

Each branch has an α of its own; the authors' Transformer layers share one between attention and MLP.

Start: α = 0, so that the network is the identity. Declared linear layers are initialized by Xavier's rule, as in the
paper's Transformers, others as in the block's library. The model's last norm stays, and so do norms inside a branch,
such as those of queries and keys. Parameters: one per branch, minus the norms. Traffic: as in the plain stream.

A gated MLP, as in LLaMA, multiplies two maps of a stream that has no norm here, so that a large value grows with its
cube from block to block: such runs diverge easily (docs/depth-bench.md). The paper's MLPs have no gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .branches import BranchParts
from .design import Branch, Connection, Place
from .linears import misses_linear, start_of
from .scales import Gain

__all__ = ["ReZero"]


class ReZero(Connection):
    title = "one learned gain a branch, which starts at 0, without norms"
    source = "arXiv 2003.04887, Eq. 2"
    scales_branches = True
    needs = ("norm",)

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.alpha = Gain(0.0)

    def init_weights(self) -> None:
        self.alpha.reset_parameters()

    def init_branch(self, block: nn.Module, parts: BranchParts) -> None:
        if not parts.linears or misses_linear(block, parts):  # such as a layer that wraps another
            return
        for weight in start_of(block, parts) or ():
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + self.alpha(F(x))

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for one in parts:
            block.set_submodule(one.norm, nn.Identity())
