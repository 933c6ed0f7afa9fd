"""Other methods that make very deep Transformers trainable: timm's Block with other norms, gains or initialization.

``depth_method=`` of the Steps-DeiT models, with several steps or with one (the baseline), so that a StepsNet can be
compared with each method and combined with it. The paper calls its design "compatible with various initialization
techniques".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

__all__ = ["DEPTH_METHODS", "DeepNormBlock", "FixupBlock", "NormFormerBlock", "ReZeroBlock", "with_depth_method"]


class Gain(nn.Module):
    """x -> a x, with one learned number a for all channels, which starts at ``initial``."""

    def __init__(self, initial: float):
        super().__init__()
        self.initial, self.gain = initial, nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Shift(nn.Module):
    """x -> x + b, with one learned number b for all channels, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class HeadScale(nn.Module):
    """A learned gain per head on the output of the attention, before its projection: (B, N, H·D) -> (B, N, H·D)."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        heads = x.reshape(B, N, self.gain.shape[0], -1) * self.gain[:, None]  # (B, N, H, D)
        return heads.reshape(B, N, C)


class ReZeroBlock(Block):
    """x + a F(x) with a = 0 at the start, without normalization: Bachlechner et al., 2021."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        self.ls1, self.ls2 = Gain(0.0), Gain(0.0)

    def init_weights(self) -> None:
        for linear in _linears(self):
            nn.init.xavier_uniform_(linear)


class FixupBlock(Block):
    """x + a F(x) without normalization, with F's last layer at 0 and the others scaled by L^(-1/2): Zhang et al., 2019.

    L is the number of residual branches, two per block; a branch has m = 2 layers in sequence, hence the exponent
    -1/(2m - 2). A learned number is added before each linear layer, and one multiplies the branch. The classifier
    keeps timm's initialization; in Fixup it starts at 0.
    """

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        assert isinstance(self.mlp, Mlp)
        self.norm1, self.norm2 = Shift(), Shift()
        self.attn.norm, self.mlp.norm = Shift(), Shift()  # before the branch's last layer
        self.ls1, self.ls2 = Gain(1.0), Gain(1.0)
        self.branch_scale = (2 * num_blocks) ** -0.5

    def init_weights(self) -> None:
        query, key, value, proj, fc1, fc2 = _linears(self)
        for weight in (query, key, value, fc1):
            nn.init.xavier_uniform_(weight)
        for weight in (value, fc1):
            weight.mul_(self.branch_scale)
        for weight in (proj, fc2):
            nn.init.zeros_(weight)


class DeepNormBlock(Block):
    """norm(αx + F(x)) with α = (2N)^¼: Wang et al., 2022, for encoders of N blocks.

    The initial weights of F's values, projection and MLP are scaled by β = (8N)^-¼.
    """

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha, self.beta = (2 * num_blocks) ** 0.25, (8 * num_blocks) ** -0.25

    def init_weights(self) -> None:
        query, key, *others = _linears(self)
        for weight in (query, key):
            nn.init.xavier_normal_(weight)
        for weight in others:
            nn.init.xavier_normal_(weight, gain=self.beta)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        attended = self.attn(x, attn_mask=attn_mask, is_causal=is_causal)
        x = self.norm1(self.alpha * x + self.drop_path1(self.ls1(attended)))
        return self.norm2(self.alpha * x + self.drop_path2(self.ls2(self.mlp(x))))


class NormFormerBlock(Block):
    """A gain per head, and norms after the attention and inside the MLP: Shleifer et al., 2021."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **{**kwargs, "scale_mlp_norm": True})
        assert isinstance(self.norm1, nn.Module)
        self.attn.norm = HeadScale(self.attn.num_heads)
        self.ls1 = type(self.norm1)(self.norm1.normalized_shape)


# None: timm's Block has an argument for the method
DEPTH_METHODS: dict[str, Callable[..., Block] | None] = {
    "layer_scale": None,
    "rezero": ReZeroBlock,
    "deepnorm": DeepNormBlock,
    "fixup": FixupBlock,
    "normformer": NormFormerBlock,
}


def with_depth_method(method: str | None, num_blocks: int, block_fn: Any, given: dict[str, Any]) -> tuple[Any, dict]:
    """The block and the arguments of VisionTransformer for a method; those given if ``method`` is None.

    Args:
        method: a key of DEPTH_METHODS.
        num_blocks: blocks of the model, over all steps.
        block_fn: the block in use without a method.
        given: the arguments of VisionTransformer without a method.

    Raises:
        ValueError: an unknown method, or an argument that the method sets itself.
    """
    if method is None:
        return block_fn, given
    if method not in DEPTH_METHODS:
        raise ValueError(f"depth_method: got {method!r}, expected one of {', '.join(DEPTH_METHODS)}")
    conflicting = [name for name in ("init_values", "scale_attn_norm", "scale_mlp_norm") if given.get(name)]
    if conflicting or block_fn is not Block:
        raise ValueError(
            f"depth_method: got {method!r} with {(conflicting or ['block_fn'])[0]}, expected only one of them"
        )
    block = DEPTH_METHODS[method]
    if block is None:  # LayerScale with the initial values of CaiT, Touvron et al., 2021
        initial = 0.1 if num_blocks <= 18 else 1e-5 if num_blocks <= 24 else 1e-6
        return block_fn, {**given, "init_values": initial}
    return partial(block, num_blocks=num_blocks), given


def _linears(block: Block) -> list[Tensor]:
    """Views of the weights of queries, keys, values, projection, and the two layers of the MLP."""
    assert isinstance(block.mlp, Mlp)
    qkv = block.attn.qkv.weight.detach().chunk(3)  # timm keeps the three in one (3C, C) weight
    return [*qkv, *(layer.weight.detach() for layer in (block.attn.proj, block.mlp.fc1, block.mlp.fc2))]
