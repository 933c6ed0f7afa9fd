"""Steps-Swin: Swin with the blocks of its later stages in steps of several widths (Table 14).

Stem, patch merging, blocks and head are timm's; a stage's blocks form a StepsNet. With one step per
stage, the model is Swin itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, calculate_drop_path_rates, to_2tuple, to_ntuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    checkpoint_filter_fn,
)
from torch import Tensor, nn

from ..plan import per_block
from .assembly import (
    assemble,
    check_nested,
    check_stages,
    model_cfg,
    resolve_heads,
    set_grad_checkpointing,
    with_defaults,
)

__all__ = ["ARCHITECTURES", "StepsSwin", "StepsSwinStage", "create_steps_swin", "swin_cfg"]

# Table 14, by stage. Its 768×0 and 1024×0 mean that the fourth stage is 544 or 720 wide.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "steps_swin_tiny_patch4_window7_224": dict(
        widths=((96,), (192,), (192, 272, 384), (192, 272, 384, 544)),
        num_heads=((3,), (6,), (6, 8, 12), (6, 8, 12, 16)),
        depths=((2,), (2,), (6, 3, 3), (4, 2, 2, 2)),
    ),
    "steps_swin_small_patch4_window7_224": dict(
        widths=((96,), (192,), (192, 272, 384), (192, 272, 384, 544)),
        num_heads=((3,), (6,), (6, 8, 12), (6, 8, 12, 16)),
        depths=((2,), (2,), (6, 3, 15), (4, 2, 2, 2)),
    ),
    "steps_swin_base_patch4_window7_224": dict(
        widths=((128,), (256,), (256, 360, 512), (256, 360, 512, 720)),
        num_heads=((4,), (8,), (8, 12, 16), (8, 12, 16, 24)),
        depths=((2,), (2,), (6, 3, 15), (4, 2, 2, 2)),
    ),
    "test_steps_swin": dict(
        widths=((16,), (32,), (32, 48, 64), (64, 96)),
        num_heads=((1,), (2,), (2, 2, 4), (4, 4)),
        depths=((1,), (1,), (2, 1, 1), (2, 0)),
    ),
    "test_steps_swin_baseline": dict(
        widths=((16,), (32,), (64,), (96,)), num_heads=((1,), (2,), (4,), (4,)), depths=((1,), (1,), (2,), (1,))
    ),
}
BASELINES = {
    "steps_swin_tiny_patch4_window7_224": "swin_tiny_patch4_window7_224",
    "steps_swin_small_patch4_window7_224": "swin_small_patch4_window7_224",
    "steps_swin_base_patch4_window7_224": "swin_base_patch4_window7_224",
    "test_steps_swin": "test_steps_swin_baseline",
}


class StepsSwinStage(SwinTransformerStage):
    """One stage: patch merging to the stage's width, and a StepsNet of blocks.

    Shape: (B, H, W, dim) -> (B, H', W', C), C the largest of ``widths``; a stage that downsamples halves H and W.
    """

    def __init__(
        self,
        dim: int,
        widths: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
        input_resolution: tuple[int, int],
        downsample: bool,
        window_size: tuple[int, int],
        drop_path: Sequence[float],
        block_fn: Callable[..., nn.Module],
        norm_layer: Callable[..., nn.Module],
        device=None,
        dtype=None,
        **block_kwargs,
    ):
        super().__init__(
            dim=dim,
            out_dim=max(widths),
            input_resolution=input_resolution,
            depth=0,
            downsample=downsample,
            norm_layer=norm_layer,
            device=device,
            dtype=dtype,
        )
        self.depth = sum(depths)
        half_window = tuple(size // 2 for size in window_size)
        blocks = [
            block_fn(
                dim=width,
                num_heads=heads,
                input_resolution=self.output_resolution,
                window_size=window_size,
                shift_size=0 if index % 2 == 0 else half_window,  # our choice: alternate through the whole stage
                drop_path=drop_path[index],
                norm_layer=norm_layer,
                device=device,
                dtype=dtype,
                **block_kwargs,
            )
            for index, (width, heads) in enumerate(per_block(list(zip(widths, num_heads)), depths))
        ]
        self.blocks = assemble(blocks, widths, depths, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class StepsSwin(SwinTransformer):
    """Swin whose stages each hold a :class:`stepsnet.StepsNet`.

    Args:
        widths: C_1 … C_n of each stage in the order of execution, positive integers; the largest is the stage's
            width, which the patch merging before it produces.
        depths: blocks of each step, nested in the same way.
        num_heads: attention heads of each step; by default those whose size is nearest to 32.
        block_fn: timm's ``SwinTransformerBlock``, or another block with its signature.
        head_dim: size of an attention head, one for all stages or one for each; by default the width over
            ``num_heads``, which has to divide it in any case.
        mlp_ratio: hidden size of the MLPs over their width, one for all stages or one for each.
        **kwargs: everything else that :class:`timm.models.SwinTransformer` takes.

    Shape: (B, in_chans, H, W) -> (B, num_classes); features are (B, H, W, C).

    Raises:
        ValueError: widths that are not positive integers, lists of unequal length, or heads that do not divide a width.
    """

    def __init__(
        self,
        widths: Sequence[Sequence[int]] = ((96,), (192,), (192, 272, 384), (192, 272, 384, 544)),
        depths: Sequence[Sequence[int]] = ((2,), (2,), (6, 3, 3), (4, 2, 2, 2)),
        num_heads: Sequence[Sequence[int]] | None = None,
        block_fn: Callable[..., nn.Module] = SwinTransformerBlock,
        num_classes: int = 1000,
        global_pool: str = "avg",
        head_dim: int | Sequence[int | None] | None = None,
        always_partition: bool = False,
        mlp_ratio: float | Sequence[float] = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_layer: Any = nn.LayerNorm,
        weight_init: str = "",
        device=None,
        dtype=None,
        **kwargs,
    ):
        check_stages(widths, depths)
        if num_heads is not None:
            check_nested("num_heads", num_heads, len(widths))
        heads = [
            resolve_heads(stage_widths, None if num_heads is None else num_heads[stage], 32, f" of stage {stage + 1}")
            for stage, stage_widths in enumerate(widths)
        ]
        # timm's constructor makes the stem and sets the attributes; its stages, left empty, are replaced
        super().__init__(
            embed_dim=max(widths[0]),
            depths=(0,) * len(widths),
            num_heads=tuple(stage[-1] for stage in heads),
            num_classes=num_classes,
            global_pool=global_pool,
            norm_layer=norm_layer,
            weight_init="skip",
            device=device,
            dtype=dtype,
            **kwargs,
        )
        mlp_ratios, head_dims = (to_ntuple(len(widths))(given) for given in (mlp_ratio, head_dim))
        for name, given in (("mlp_ratio", mlp_ratios), ("head_dim", head_dims)):
            if len(given) != len(widths):
                raise ValueError(f"{name}: got {given}, expected one number, or {len(widths)} numbers, one per stage")
        drop_paths = calculate_drop_path_rates(drop_path_rate, [sum(stage) for stage in depths], stagewise=True)
        stage_width = self.embed_dim
        stages = []
        for index, empty in enumerate(self.layers):  # type: ignore[has-type]
            stages.append(
                StepsSwinStage(
                    dim=stage_width,
                    widths=widths[index],
                    depths=depths[index],
                    num_heads=heads[index],
                    input_resolution=empty.input_resolution,
                    downsample=isinstance(empty.downsample, PatchMerging),
                    window_size=to_2tuple(self._ref_window_sizes[index]),
                    drop_path=drop_paths[index],
                    block_fn=block_fn,
                    norm_layer=norm_layer,
                    head_dim=head_dims[index],
                    always_partition=always_partition,
                    dynamic_mask=self.dynamic_img_size,
                    mlp_ratio=mlp_ratios[index],
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    device=device,
                    dtype=dtype,
                )
            )
            stage_width = max(widths[index])
            self.feature_info[index]["num_chs"] = stage_width
        self.layers = nn.Sequential(*stages)
        self.num_features = stage_width
        self.norm = norm_layer(self.num_features, device=device, dtype=dtype)
        self.head = ClassifierHead(
            self.num_features,
            num_classes,
            pool_type=global_pool,
            drop_rate=drop_rate,
            input_fmt=self.output_fmt,
            device=device,
            dtype=dtype,
        )
        self.head_hidden_size = self.head.num_features
        self.weight_init_mode = "reset" if weight_init == "skip" else weight_init
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        set_grad_checkpointing(self, enable)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        matcher = super().group_matcher(coarse)
        if not coarse:
            stages: list[Any] = list(self.layers.children())
            first = [next((i for i, n in enumerate(stage.blocks.networks) if len(n)), 0) for stage in stages]
            matcher["blocks"] = [
                # a patch merging is grouped with the first block after it
                *((rf"^layers\.({stage})\.downsample", (step, 0)) for stage, step in enumerate(first)),
                (r"^layers\.(\d+)\.blocks\.networks\.(\d+)\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
        return matcher


def from_baseline(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the baseline's keys to the 1-step model's: ``layers.s.blocks.i`` is ``layers.s.blocks.networks.0.i``."""
    pattern, ours = r"^layers\.(\d+)\.blocks\.(\d+)\.", r"layers.\1.blocks.networks.0.\2."
    return {re.sub(pattern, ours, key): value for key, value in state_dict.items()}


def _filter_checkpoint(state_dict: dict, model: StepsSwin) -> dict:
    state_dict = state_dict.get("state_dict", state_dict.get("model", state_dict))
    return checkpoint_filter_fn(from_baseline(state_dict), model)


def create_steps_swin(variant: str, architecture: dict[str, Any], pretrained: bool = False, **kwargs) -> StepsSwin:
    """Build a StepsSwin through timm's builder (also used by Swin++)."""
    out_indices = kwargs.pop("out_indices", (0, 1, 2, 3))
    return build_model_with_cfg(
        StepsSwin,
        variant,
        pretrained,
        pretrained_filter_fn=_filter_checkpoint,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **with_defaults(architecture, kwargs),
    )


def swin_cfg(**kwargs) -> dict:
    return model_cfg(first_conv="patch_embed.proj", classifier="head.fc", **{"pool_size": (7, 7), **kwargs})


def _create(variant: str, pretrained: bool = False, **kwargs) -> StepsSwin:
    return create_steps_swin(variant, ARCHITECTURES[variant], pretrained, **kwargs)


default_cfgs = generate_default_cfgs({name: swin_cfg() for name in ARCHITECTURES})


@register_model
def steps_swin_tiny_patch4_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin-T of Table 1, 26 blocks."""
    return _create("steps_swin_tiny_patch4_window7_224", pretrained, **kwargs)


@register_model
def steps_swin_small_patch4_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin-S of Table 1, 38 blocks."""
    return _create("steps_swin_small_patch4_window7_224", pretrained, **kwargs)


@register_model
def steps_swin_base_patch4_window7_224(pretrained: bool = False, **kwargs) -> StepsSwin:
    """Steps-Swin-B of Table 1, 38 blocks."""
    return _create("steps_swin_base_patch4_window7_224", pretrained, **kwargs)


@register_model
def test_steps_swin(pretrained: bool = False, **kwargs) -> StepsSwin:
    """A small model for tests, whose widest step has no blocks."""
    return _create("test_steps_swin", pretrained, **kwargs)


@register_model
def test_steps_swin_baseline(pretrained: bool = False, **kwargs) -> StepsSwin:
    """The same with one step per stage."""
    return _create("test_steps_swin_baseline", pretrained, **kwargs)
