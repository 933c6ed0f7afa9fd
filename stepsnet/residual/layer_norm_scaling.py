r"""LayerNorm Scaling: Sun et al., "The Curse of Depth in Large Language Models", arXiv 2502.05795, Sec. 4.

    x_{l+1} = x_l + Layer_l(norm(x_l) / √b)        b: the block's number in the model, from 1

Both branches of a block use its number. Start: as the plain network, but for the factor. Parameters, traffic, memory:
as in the plain network. The paper drops any initialization that is scaled by depth; here, that of a library's blocks,
such as GPT-2's, is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .branches import BranchParts, check_no_replica
from .design import Branch, Connection, Place
from .known_blocks import check_no_norm_behind

__all__ = ["LayerNormScaling"]


class LayerNormScaling(Connection):
    title = "norms times 1/√b in block b"
    source = "arXiv 2502.05795, Sec. 4"
    needs = ("norm",)
    factor: Tensor

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        # a Python number would be a constant of the block's graph, and each block would be compiled anew
        self.register_buffer("factor", torch.empty(()), persistent=False)
        self.register_load_state_dict_post_hook(_start_again)  # for a model that was on the meta device until then
        self.init_weights()

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        check_no_norm_behind("layer_norm_scaling", block, parts)  # which would undo the factor

    def init_weights(self) -> None:
        self.factor.fill_(self.place.block**-0.5)  # on the meta device it stays empty

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x)

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        return [parts.norm]

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for index, one in enumerate(parts):
            block.get_submodule(one.norm).register_forward_hook(partial(_scaled, block, index))


def _start_again(connection: LayerNormScaling, keys: Any) -> None:
    if connection.factor.is_meta:  # the weights were assigned; a CPU scalar works with those of any device
        connection.factor = torch.empty((), dtype=connection.factor.dtype)
    connection.init_weights()


def _scaled(block: Any, index: int, norm: Any, arguments: Any, output: Tensor) -> Tensor:
    check_no_replica(norm)
    return output * block.connections[index].factor
