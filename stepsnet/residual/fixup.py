r"""Fixup: Zhang et al., "Fixup Initialization: Residual Learning Without Normalization", arXiv 1901.09321, Sec. 3.

    x_{l+1} = x_l + a_l F_l(x_l), F without norms, with a learned number added in front of each linear layer

In front of the activation it is fc1's own bias. Start: F's last layer at 0, a = 1, the added numbers at 0, and values
and fc1 scaled by L^(-1/(2m - 2)) with L branches of m layers in sequence: two branches a block, m = 2, so L^(-1/2);
queries and keys are beside that sequence and as they are. The classifier keeps timm's initialization; in Fixup it
starts at 0. Parameters: six numbers a block, less the norms. Traffic: that of the plain stream.
"""

from __future__ import annotations

from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import nn

from .design import Connection
from .scales import Gain, Shift
from .timm_blocks import linears_of

__all__ = ["Fixup", "FixupBlock"]


class FixupBlock(Block):
    """timm's Block with Fixup's gain, shifts and initialization."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        assert isinstance(self.mlp, Mlp)
        self.norm1, self.norm2 = Shift(), Shift()
        self.attn.norm, self.mlp.norm = Shift(), Shift()  # before the branch's last layer
        self.ls1, self.ls2 = Gain(1.0), Gain(1.0)
        self.branch_scale = (2 * num_blocks) ** -0.5

    def init_weights(self) -> None:
        query, key, value, proj, fc1, fc2 = linears_of(self)
        for weight in (query, key, value, fc1):
            nn.init.xavier_uniform_(weight)
        for weight in (value, fc1):
            weight.mul_(self.branch_scale)
        for weight in (proj, fc2):
            nn.init.zeros_(weight)


class Fixup(Connection):
    title = "no norms; branches start at 0, their first layers scaled by depth"
    source = "arXiv 1901.09321, Sec. 3"
    timm_block = FixupBlock
    joins = False
