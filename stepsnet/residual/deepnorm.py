r"""DeepNorm: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, Sec. 3 and Fig. 2.

    x_{l+1} = LN(α x_l + F_l(x_l)), F without a norm in front        α = (2N)^¼ for an encoder of N blocks

Start: the weights of F's values, projection and MLP are scaled by β = (8N)^-¼ (Xavier's rule with that gain), queries
and keys are not. The norm's weights stay where the block has them. Parameters: those of the plain network. Traffic:
that of the plain stream and its norm. For timm's Block, since the initialization names its layers.
"""

from __future__ import annotations

from typing import Optional

from timm.models.vision_transformer import Block
from torch import Tensor, nn

from .design import Connection
from .timm_blocks import linears_of

__all__ = ["DeepNorm", "DeepNormBlock"]


class DeepNormBlock(Block):
    """norm(αx + F(x)) with timm's parts."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha, self.beta = (2 * num_blocks) ** 0.25, (8 * num_blocks) ** -0.25

    def init_weights(self) -> None:
        query, key, *others = linears_of(self)
        for weight in (query, key):
            nn.init.xavier_normal_(weight)
        for weight in others:
            nn.init.xavier_normal_(weight, gain=self.beta)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        attended = self.attn(x, attn_mask=attn_mask, is_causal=is_causal)
        x = self.norm1(self.alpha * x + self.drop_path1(self.ls1(attended)))
        return self.norm2(self.alpha * x + self.drop_path2(self.ls2(self.mlp(x))))


class DeepNorm(Connection):
    title = "norms behind the sum, a larger stream and smaller initial weights"
    source = "arXiv 2203.00555, Sec. 3"
    timm_block = DeepNormBlock
    joins = False
