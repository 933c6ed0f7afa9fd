"""Swin++ and Steps-Swin++ (Fig. 5): Swin's block with the LPU and the ConvFFN of CMT.

CMT (Guo et al., CVPR 2022) puts a depth-wise 3×3 convolution with a shortcut before the attention (the local
perception unit), and another between the two layers of the MLP. The rest is Swin's, layer normalization included.
The macro design is that of Swin and of Steps-Swin.

The paper says no more than "components like LPU and ConvFFN". We take CMT's equations, without the batch norms and the
second activation that its text adds after the convolutions, so that without its convolutions the block is Swin's. The
convolutions keep torch's initialization.
"""

from __future__ import annotations

from typing import Any

from timm.layers import Mlp
from timm.models import generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from .steps_swin import ARCHITECTURES as STEPS_SWIN
from .steps_swin import StepsSwin, create_steps_swin, swin_cfg

__all__ = ["ConvFFN", "LocalPerceptionUnit", "SwinPlusBlock"]

# The baselines have Swin's widths and depths, one step per stage.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "swinpp_tiny_window7_224": dict(
        widths=((96,), (192,), (384,), (768,)),
        num_heads=((3,), (6,), (12,), (24,)),
        depths=((2,), (2,), (6,), (2,)),
    ),
    "swinpp_small_window7_224": dict(
        widths=((96,), (192,), (384,), (768,)),
        num_heads=((3,), (6,), (12,), (24,)),
        depths=((2,), (2,), (18,), (2,)),
    ),
    "swinpp_base_window7_224": dict(
        widths=((128,), (256,), (512,), (1024,)),
        num_heads=((4,), (8,), (16,), (32,)),
        depths=((2,), (2,), (18,), (2,)),
    ),
    "steps_swinpp_tiny_window7_224": STEPS_SWIN["steps_swin_tiny_patch4_window7_224"],
    "steps_swinpp_small_window7_224": STEPS_SWIN["steps_swin_small_patch4_window7_224"],
    "steps_swinpp_base_window7_224": STEPS_SWIN["steps_swin_base_patch4_window7_224"],
    "test_steps_swinpp": STEPS_SWIN["test_steps_swin"],
    "test_steps_swinpp_baseline": STEPS_SWIN["test_steps_swin_baseline"],
}
BASELINES = {
    "steps_swinpp_tiny_window7_224": "swinpp_tiny_window7_224",
    "steps_swinpp_small_window7_224": "swinpp_small_window7_224",
    "steps_swinpp_base_window7_224": "swinpp_base_window7_224",
    "test_steps_swinpp": "test_steps_swinpp_baseline",
}


class LocalPerceptionUnit(nn.Module):
    """LPU(x) = DWConv(x) + x, a depth-wise 3×3 convolution, CMT's Eq. (1). Shape: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, dim: int, device=None, dtype=None):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        local = self.conv(x.permute(0, 3, 1, 2))  # (B, C, H, W), a channels-last view
        return x + local.permute(0, 2, 3, 1)  # (B, H, W, C)


class ConvFFN(Mlp):
    """An MLP with a depth-wise convolution and its shortcut in the hidden layer, by the equations of CMT's IRFFN.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, in_features: int, hidden_features: int, device=None, dtype=None, **kwargs):
        super().__init__(in_features, hidden_features, device=device, dtype=dtype, **kwargs)
        self.lpu = LocalPerceptionUnit(hidden_features, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc1(x))  # (B, H, W, hidden)
        x = self.drop1(self.lpu(x))
        return self.drop2(self.fc2(x))  # (B, H, W, C)


class SwinPlusBlock(SwinTransformerBlock):
    """Swin's block with an LPU before it and a ConvFFN as its MLP. Shape: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(
        self,
        dim: int,
        *args,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        act_layer: type[nn.Module] = nn.GELU,
        device=None,
        dtype=None,
        **kwargs,
    ):
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, *args, mlp_ratio=mlp_ratio, proj_drop=proj_drop, act_layer=act_layer, **dd, **kwargs)
        self.lpu = LocalPerceptionUnit(dim, **dd)
        self.mlp = ConvFFN(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lpu(x)
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


default_cfgs = generate_default_cfgs({name: swin_cfg() for name in ARCHITECTURES})


def _create(variant: str, pretrained: bool = False, **kwargs) -> StepsSwin:
    return create_steps_swin(variant, {"block_fn": SwinPlusBlock, **ARCHITECTURES[variant]}, pretrained, **kwargs)


@register_model
def swinpp_tiny_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Swin-T with LPU and ConvFFN: the baseline of Steps-Swin++-T."""
    return _create("swinpp_tiny_window7_224", pretrained, **kwargs)


@register_model
def swinpp_small_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Swin-S with LPU and ConvFFN."""
    return _create("swinpp_small_window7_224", pretrained, **kwargs)


@register_model
def swinpp_base_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Swin-B with LPU and ConvFFN."""
    return _create("swinpp_base_window7_224", pretrained, **kwargs)


@register_model
def steps_swinpp_tiny_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin++-T of Fig. 5."""
    return _create("steps_swinpp_tiny_window7_224", pretrained, **kwargs)


@register_model
def steps_swinpp_small_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin++-S of Fig. 5."""
    return _create("steps_swinpp_small_window7_224", pretrained, **kwargs)


@register_model
def steps_swinpp_base_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin++-B of Fig. 5."""
    return _create("steps_swinpp_base_window7_224", pretrained, **kwargs)


@register_model
def test_steps_swinpp(pretrained: bool = False, **kwargs) -> StepsSwin:
    """A small model for tests."""
    return _create("test_steps_swinpp", pretrained, **kwargs)


@register_model
def test_steps_swinpp_baseline(pretrained: bool = False, **kwargs) -> StepsSwin:
    """The same with one step per stage."""
    return _create("test_steps_swinpp_baseline", pretrained, **kwargs)
