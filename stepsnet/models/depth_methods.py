"""What else makes very deep Transformers train, as timm's Block with other norms, gains and starts.

``depth_method=`` of the Steps-DeiT models, in steps or with one (the baseline): a grid can set a StepsNet beside each
method and on top of it. The paper calls its design "compatible with various initialization techniques".
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
    """x -> a x, with one number a for all channels."""

    def __init__(self, start: float):
        super().__init__()
        self.start, self.gain = start, nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Shift(nn.Module):
    """x -> x + b, with one number b for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class HeadScale(nn.Module):
    """Attention's output before its projection, (B, N, H·D) -> the same, with a gain for each head."""

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
    """a F(x) without normalization, its last layer 0 and the others L^(-1/2) smaller: Zhang et al., 2019.

    L counts residual branches, two a block; a branch has m = 2 layers in a row, hence the exponent -1/(2m - 2). A
    number is added before each linear layer, and one multiplies the branch. The head keeps timm's start, not 0.
    """

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **kwargs)
        assert isinstance(self.mlp, Mlp)
        self.norm1, self.norm2 = Shift(), Shift()
        self.attn.norm, self.mlp.norm = Shift(), Shift()  # before the branch's last layer
        self.ls1, self.ls2 = Gain(1.0), Gain(1.0)
        self.shrink = (2 * num_blocks) ** -0.5

    def init_weights(self) -> None:
        query, key, value, proj, fc1, fc2 = _linears(self)
        for weight in (query, key, value, fc1):
            nn.init.xavier_uniform_(weight)
        for weight in (value, fc1):
            weight.mul_(self.shrink)
        for weight in (proj, fc2):
            nn.init.zeros_(weight)


class DeepNormBlock(Block):
    """norm(αx + F(x)) with α = (2N)^¼, and F's values, projections and MLP begun β = (8N)^-¼ times as large.

    Wang et al., 2022, for encoders of N blocks.
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
    """Gains on the heads and norms after the attention and inside the MLP: Shleifer et al., 2021."""

    def __init__(self, *args, num_blocks: int, **kwargs):
        super().__init__(*args, **{**kwargs, "scale_mlp_norm": True})
        assert isinstance(self.norm1, nn.Module)
        self.attn.norm = HeadScale(self.attn.num_heads)
        self.ls1 = type(self.norm1)(self.norm1.normalized_shape)


# a block, or none where timm's own has what it takes
DEPTH_METHODS: dict[str, Callable[..., Block] | None] = {
    "layer_scale": None,
    "rezero": ReZeroBlock,
    "deepnorm": DeepNormBlock,
    "fixup": FixupBlock,
    "normformer": NormFormerBlock,
}


def with_depth_method(method: str | None, num_blocks: int, block_fn: Any, given: dict[str, Any]) -> tuple[Any, dict]:
    """The block and VisionTransformer's arguments under a method; without one, those given.

    Raises:
        ValueError: an unknown method, or arguments that set what the method sets.
    """
    if method is None:
        return block_fn, given
    if method not in DEPTH_METHODS:
        raise ValueError(f"depth_method: got {method!r}, expected one of {', '.join(DEPTH_METHODS)}")
    taken = [name for name in ("init_values", "scale_attn_norm", "scale_mlp_norm") if given.get(name)]
    if taken or block_fn is not Block:
        raise ValueError(f"depth_method: got {method!r} with {(taken or ['block_fn'])[0]}, expected only one of them")
    block = DEPTH_METHODS[method]
    if block is None:  # CaiT's starts of LayerScale, Touvron et al., 2021
        start = 0.1 if num_blocks <= 18 else 1e-5 if num_blocks <= 24 else 1e-6
        return block_fn, {**given, "init_values": start}
    return partial(block, num_blocks=num_blocks), given


def _linears(block: Block) -> list[Tensor]:
    """Weights in place: of queries, keys and values, the projection, and the two layers of the MLP."""
    assert isinstance(block.mlp, Mlp)
    qkv = block.attn.qkv.weight.detach().chunk(3)  # (3C, C) in one, for each a start of its own
    return [*qkv, *(layer.weight.detach() for layer in (block.attn.proj, block.mlp.fc1, block.mlp.fc2))]
