r"""LayerNorm Scaling: Sun et al., "The Curse of Depth in Large Language Models", arXiv 2502.05795, Sec. 4.

    x_{l+1} = x_l + Layer_l(norm(x_l) / √b)        b: the block's number in the model, from 1

Both branches of a block have its number. Start: as the plain network but for the factor. Parameters, traffic, memory:
those of the plain network. The paper leaves out any initialization that is scaled by depth besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .branches import BranchParts
from .design import Branch, Connection, Place

__all__ = ["LayerNormScaling"]


class LayerNormScaling(Connection):
    title = "norms times 1/√b in block b"
    source = "arXiv 2502.05795, Sec. 4"
    needs = ("norm",)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x)

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for one in parts:
            block.get_submodule(one.norm).register_forward_hook(partial(_scaled, place.block**-0.5))


def _scaled(factor: float, norm: Any, arguments: Any, output: Tensor) -> Tensor:
    return output * factor
