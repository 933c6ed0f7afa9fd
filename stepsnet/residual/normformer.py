r"""NormFormer: Shleifer et al., "Improved Transformer Pretraining with Extra Normalization", arXiv 2110.09456.

    x' = x + LN(W_o [γ_1 head_1, …, γ_H head_H](LN(x)))        γ: one number a head
    x_{l+1} = x' + W_2 LN(GELU(W_1 LN(x')))

Start: γ = 1, norms as usual. Parameters: H + 2C + 8C a block with an MLP of 4C. Traffic: that of the plain stream.
"""

from __future__ import annotations

from timm.models.vision_transformer import Block
from torch import nn

from .design import Connection
from .scales import HeadScale

__all__ = ["NormFormer", "NormFormerBlock"]


class NormFormerBlock(Block):
    """timm's Block with a gain per head, and norms after the attention and inside the MLP."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **{**kwargs, "scale_mlp_norm": True})
        assert isinstance(self.norm1, nn.Module)
        self.attn.norm = HeadScale(self.attn.num_heads)
        self.ls1 = type(self.norm1)(self.norm1.normalized_shape)


class NormFormer(Connection):
    title = "a gain per head, and norms after the attention and inside the MLP"
    source = "arXiv 2110.09456, Sec. 2"
    timm_block = NormFormerBlock
    joins = False
