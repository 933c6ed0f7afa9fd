"""Steps-DeiT: DeiT with its blocks in steps of several widths, which increase in the paper (Table 13).

The class is timm's VisionTransformer with another block container, so embeddings, head, options and
initialisation are timm's; with one step it is DeiT itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from timm.models import (
    FeatureGraphNet,
    FeatureHookNet,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..plan import check_steps, per_block
from ..residual.connected import has_design
from .assembly import assemble, model_cfg, resolve_heads, set_grad_checkpointing, with_defaults

__all__ = ["StepsDeiT"]

# Table 13: widths C, heads H and depths of each step; the baselines are 192×12, 384×12 and 768×12.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "steps_deit_tiny_patch16_224": dict(widths=(96, 136, 192), num_heads=(2, 2, 3), depths=(12, 6, 6)),
    "steps_deit_small_patch16_224": dict(widths=(192, 272, 384), num_heads=(3, 4, 6), depths=(12, 6, 6)),
    # Table 1's row of 86.7M parameters
    "steps_deit_base_patch16_224": dict(widths=(384, 544, 768), num_heads=(6, 8, 12), depths=(12, 6, 6)),
    # the row that Table 13 prints: the 302-layer model of Sec. 5.2, half of DeiT-B's parameters
    "steps_deit_base_d60_patch16_224": dict(
        widths=(96, 136, 192, 272, 384), num_heads=(2, 2, 3, 4, 6), depths=(12, 12, 12, 12, 12)
    ),
    "test_steps_deit": dict(
        widths=(32, 48, 64), num_heads=(1, 2, 2), depths=(4, 2, 3), mlp_ratio=3, dynamic_img_size=True
    ),
}
BASELINES = {
    "steps_deit_tiny_patch16_224": "deit_tiny_patch16_224",
    "steps_deit_small_patch16_224": "deit_small_patch16_224",
    "steps_deit_base_patch16_224": "deit_base_patch16_224",
    "steps_deit_base_d60_patch16_224": "deit_base_patch16_224",
    "test_steps_deit": "test_vit",
}


class StepsDeiT(VisionTransformer):
    """DeiT whose blocks form a :class:`stepsnet.StepsNet`.

    Args:
        widths: C_1 … C_n in the order of execution, positive integers; the largest is the model's ``embed_dim``.
        depths: blocks of each step.
        num_heads: attention heads of each step; by default those whose size is nearest to 64.
        block_fn: timm's ``Block``, or another block with its signature.
        residual: the design of each step's residual stream, a key of ``stepsnet.residual.DESIGNS``.
        residual_options: options of the design, such as ``{"streams": 4}``.
        **kwargs: everything else that :class:`timm.models.VisionTransformer` takes.

    Shape: (B, in_chans, H, W) -> (B, num_classes).

    Raises:
        ValueError: widths that are not positive integers, lists of unequal length, or heads that do not divide a width.
        UserError: an unknown design or option, or blocks that the design does not support.
    """

    def __init__(
        self,
        widths: Sequence[int] = (192, 272, 384),
        depths: Sequence[int] = (12, 6, 6),
        num_heads: Sequence[int] | None = None,
        block_fn=Block,
        residual: str = "plain",
        residual_options: Mapping[str, Any] | None = None,
        **kwargs,
    ):
        check_steps(widths, depths)
        num_heads = resolve_heads(widths, num_heads, head_dim=64)
        shapes = iter(per_block(list(zip(widths, num_heads)), depths))

        def block_of_its_step(*, dim: int, num_heads: int, **block_kwargs):
            dim, num_heads = next(shapes)  # in place of the model's own width and heads
            return block_fn(dim=dim, num_heads=num_heads, **block_kwargs)

        embed_dim, embed_heads = max(zip(widths, num_heads))
        super().__init__(
            embed_dim=embed_dim,
            depth=sum(depths),
            num_heads=embed_heads,
            block_fn=block_of_its_step,
            **kwargs,
        )
        blocks = list(self.blocks)  # type: ignore[has-type]
        self.blocks = assemble(blocks, widths, depths, -1, residual, residual_options)
        names = [name for name, _ in self.blocks.named_modules() if re.fullmatch(r"networks\.\d+\.\d+", name)]
        for info, name, width in zip(self.feature_info, names, per_block(widths, depths)):
            info.update(module=f"blocks.{name}", written_chs=width)

    def forward_features(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        if torch.jit.is_scripting():  # TorchScript cannot compile timm's loop over blocks
            assert attn_mask is None and not is_causal, "a scripted Steps-DeiT takes no attn_mask and no is_causal"
        elif attn_mask is not None or is_causal:
            return super().forward_features(x, attn_mask, is_causal)
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))  # (B, N, C)
        return self.norm(self.blocks(x))

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load the weights of a JAX ViT, an .npz file, as timm does. They have one width, for a model of one step."""
        if len(self.blocks.widths) > 1:
            raise ValueError(f"{checkpoint_path}: got weights of one width, expected a model of one step to load them")
        steps: Any = self.blocks
        joined: Any = steps.networks[0]  # the blocks, or a design that holds them as ``blocks``
        blocks = list(getattr(joined, "blocks", joined))
        if not all(hasattr(block.norm1, "weight") for block in blocks):  # as in rezero, fixup and deepnorm
            raise ValueError(f"{checkpoint_path}: got norms of a ViT, expected a design that leaves the blocks' norms")
        self.blocks = nn.Sequential(*blocks)  # type: ignore[assignment]
        try:
            super().load_pretrained(checkpoint_path, prefix)
        finally:
            self.blocks = steps

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        self.grad_checkpointing = False
        set_grad_checkpointing(self, enable)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        blocks: list[tuple[str, Optional[tuple[int]]]] = [(r"^blocks\.networks\.(\d+)\.(\d+)", None)]
        # timm's 99999 joins the group before: that of the last block of the step, or of the last block of all
        blocks += [(r"^blocks\.networks\.(\d+)\.wiring", (99999,)), (r"^norm", (99999,))]
        return {**super().group_matcher(coarse), "blocks": blocks}


def from_baseline(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the baseline's keys to the 1-step model's: ``blocks.i`` is ``blocks.networks.0.i``."""
    return {re.sub(r"^blocks\.(\d+)\.", r"blocks.networks.0.\1.", key): value for key, value in state_dict.items()}


def _filter_checkpoint(state_dict: dict, model: StepsDeiT) -> dict:
    return from_baseline(checkpoint_filter_fn(state_dict, model, adapt_layer_scale=True))


def _create(variant: str, pretrained: bool = False, **kwargs) -> StepsDeiT:
    model: Any = build_model_with_cfg(
        StepsDeiT,
        variant,
        pretrained,
        pretrained_filter_fn=_filter_checkpoint,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **with_defaults(ARCHITECTURES[variant], kwargs),
    )
    if isinstance(model, FeatureHookNet | FeatureGraphNet):  # features are what a block writes, not the whole stream
        if has_design(model):
            raise ValueError(
                "feature_cls: got hook or fx for a residual design, whose blocks pass on more than the stream, "
                "expected getter, the default"
            )
        for info in model.feature_info.info:
            info["num_chs"] = info["written_chs"]
    return model


def _cfg(**kwargs) -> dict:
    return model_cfg(first_conv="patch_embed.proj", classifier="head", **kwargs)


default_cfgs = generate_default_cfgs(
    {
        **{name: _cfg() for name in ARCHITECTURES},
        "test_steps_deit": _cfg(input_size=(3, 160, 160), crop_pct=0.95),
    }
)


@register_model
def steps_deit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> StepsDeiT:
    """Steps-DeiT-T of Table 1, 24 blocks."""
    return _create("steps_deit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def steps_deit_small_patch16_224(pretrained: bool = False, **kwargs) -> StepsDeiT:
    """Steps-DeiT-S of Table 1, 24 blocks."""
    return _create("steps_deit_small_patch16_224", pretrained, **kwargs)


@register_model
def steps_deit_base_patch16_224(pretrained: bool = False, **kwargs) -> StepsDeiT:
    """Steps-DeiT-B of Table 1, 24 blocks."""
    return _create("steps_deit_base_patch16_224", pretrained, **kwargs)


@register_model
def steps_deit_base_d60_patch16_224(pretrained: bool = False, **kwargs) -> StepsDeiT:
    """The 302-layer Steps-DeiT-B of Sec. 5.2, 60 blocks, 384 wide."""
    return _create("steps_deit_base_d60_patch16_224", pretrained, **kwargs)


@register_model
def test_steps_deit(pretrained: bool = False, **kwargs) -> StepsDeiT:
    """A small model for tests: timm's test_vit in three steps."""
    return _create("test_steps_deit", pretrained, **kwargs)
