r"""DeepNorm: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, Sec. 3 and Fig. 2.

    x_{l+1} = LN(α x_l + F_l(x_l)), F without a norm in front        α = (2N)^¼ for N blocks, all encoder or all decoder

Start: the weights of F's values, output projection and MLP are scaled by β = (8N)^-¼ (Xavier's rule with that gain),
those of queries and keys are not; in a gated MLP all three layers are scaled. LN is the norm that stood in front of F,
and N counts the blocks of the whole model, over all steps of a StepsNet. The model's last norm stays, after that of the
last sum, and so do norms inside a branch, such as those of queries and keys. Parameters: as in the plain network.
Traffic: as in the plain stream, with the norm fused with the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .branches import BranchParts
from .design import Branch, Connection, Place, reset_norm
from .linears import start_of

__all__ = ["DeepNorm"]


class DeepNorm(Connection):
    title = "norms behind the sum, a larger stream and smaller initial weights"
    source = "arXiv 2203.00555, Sec. 3"
    scales_branches = True
    needs = ("norm", "linears")

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.alpha, self.beta = (2 * place.blocks) ** 0.25, (8 * place.blocks) ** -0.25
        self.norm: Any = place.norm

    def init_weights(self) -> None:
        reset_norm(self.norm)

    def init_branch(self, block: nn.Module, parts: BranchParts) -> None:
        if (weights := start_of(block, parts)) is None:
            return
        reset_norm(self.norm)
        for weight in weights.queries_keys:
            nn.init.xavier_normal_(weight)
        for weight in (*weights.gates, weights.values, weights.last):
            nn.init.xavier_normal_(weight, gain=self.beta)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return self.norm(self.alpha * x + F(x))

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for one in parts:
            block.set_submodule(one.norm, nn.Identity())
