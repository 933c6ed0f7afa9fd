"""Steps-ResNet: ResNet with the blocks of its later stages in steps of several widths (Table 12).

A stage's first block changes resolution and width; it stays as it is, before the StepsNet of the other
blocks. With one step per stage, the model is ResNet itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from ..plan import per_block
from .assembly import assemble, check_stages, model_cfg, set_grad_checkpointing, with_defaults

__all__ = ["StepsResNet"]

# Table 12, by stage, with C the bottleneck dimension and without each stage's first block. Stages 1
# and 2 of -34 and -50 are the baseline's: only then are the blocks and parameters those of Table 1.
_DEEP = dict(
    widths=((64,), (128,), (64, 90, 128, 181, 256), (64, 90, 128, 181, 256, 362, 512)),
    depths=((2,), (3,), (6, 3, 3, 3, 2), (2, 1, 1, 1, 1, 1, 1)),
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "steps_resnet18": dict(
        block=BasicBlock,
        widths=((64,), (128,), (64, 90, 128, 181, 256), (64, 90, 128, 181, 256, 362, 512)),
        depths=((1,), (1,), (2, 1, 1, 1, 0), (2, 1, 1, 1, 1, 1, 0)),
    ),
    "steps_resnet34": dict(block=BasicBlock, **_DEEP),
    "steps_resnet50": dict(block=Bottleneck, **_DEEP),
    "test_steps_resnet": dict(
        block=Bottleneck,
        widths=((8,), (16,), (12, 16, 24), (16, 24, 32)),
        depths=((1,), (1,), (2, 1, 1), (2, 1, 0)),
    ),
    "test_steps_resnet_baseline": dict(
        block=Bottleneck, widths=((8,), (16,), (24,), (32,)), depths=((1,), (1,), (2,), (1,))
    ),
}
BASELINES = {
    "steps_resnet18": "resnet18",
    "steps_resnet34": "resnet34",
    "steps_resnet50": "resnet50",
    "test_steps_resnet": "test_steps_resnet_baseline",
}


class StepsResNet(ResNet):
    """ResNet whose stages each hold a :class:`stepsnet.StepsNet`, after their downsampling block.

    Args:
        widths: C_1 … C_n of each stage in the order of execution, as bottleneck dimensions; the largest is the
            stage's own. The stream's channels are C times the block's expansion.
        depths: blocks of each step, nested in the same way, without each stage's first block.
        block: timm's ``BasicBlock`` or ``Bottleneck``.
        **kwargs: everything else that :class:`timm.models.ResNet` takes.

    Shape: (B, in_chans, H, W) -> (B, num_classes).

    Raises:
        ValueError: widths that are not positive integers, lists of unequal length, or another kind of ``block``.
    """

    def __init__(
        self,
        widths: Sequence[Sequence[int]] = ((64,), (128,), (256,), (512,)),
        depths: Sequence[Sequence[int]] = ((2,), (3,), (5,), (2,)),
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck,
        **kwargs,
    ):
        check_stages(widths, depths)
        if not hasattr(block, "expansion"):
            raise ValueError(f"block: got {block!r}, expected timm's BasicBlock or Bottleneck, one for all stages")
        planes_per_block: list[int] = []  # of the whole model, in the order of execution
        for stage_widths, stage_depths in zip(widths, depths):
            planes_per_block += [max(stage_widths), *per_block(stage_widths, stage_depths)]
        remaining = iter(planes_per_block)

        def block_of_its_step(inplanes, planes, stride, downsample, **block_kwargs):
            own_planes = next(remaining)
            if own_planes != planes:  # narrower than the stage, so not its first block
                inplanes, planes = own_planes * block.expansion, own_planes
            return block(inplanes, planes, stride, downsample, **block_kwargs)

        block_of_its_step.expansion = block.expansion  # type: ignore[attr-defined]
        super().__init__(
            block=block_of_its_step,
            layers=tuple(1 + sum(stage_depths) for stage_depths in depths),
            channels=tuple(max(stage_widths) for stage_widths in widths),
            **kwargs,
        )
        for index, (stage_widths, stage_depths) in enumerate(zip(widths, depths), 1):
            first, *others = getattr(self, f"layer{index}")
            channels = [width * block.expansion for width in stage_widths]
            steps = assemble(others, channels, stage_depths, dim=1)
            setattr(self, f"layer{index}", nn.Sequential(first, steps))

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        set_grad_checkpointing(self, enable)  # each stage's first block runs as usual

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        matcher = super().group_matcher(coarse)
        if not coarse:
            matcher["blocks"] = [
                (r"^layer(\d+)\.(\d+)\.networks\.(\d+)\.(\d+)", None),
                (r"^layer(\d+)\.(\d+)", None),
            ]
        return matcher


def from_baseline(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the baseline's keys to the 1-step model's: ``layer3.i``, i > 0, is ``layer3.1.networks.0.(i-1)``."""

    def ours(match: re.Match) -> str:
        return f"layer{match[1]}.1.networks.0.{int(match[2]) - 1}."

    return {re.sub(r"^layer(\d+)\.([1-9]\d*)\.(?!networks)", ours, key): value for key, value in state_dict.items()}


def _create(variant: str, pretrained: bool = False, **kwargs) -> StepsResNet:
    return build_model_with_cfg(
        StepsResNet,
        variant,
        pretrained,
        pretrained_filter_fn=lambda state_dict, model: from_baseline(state_dict),
        **with_defaults(ARCHITECTURES[variant], kwargs),
    )


def _cfg(**kwargs) -> dict:
    fixed = dict(pool_size=(7, 7), crop_pct=0.875, interpolation="bicubic", fixed_input_size=False)
    return model_cfg(first_conv="conv1", classifier="fc", **{**fixed, **kwargs})


default_cfgs = generate_default_cfgs({name: _cfg() for name in ARCHITECTURES})


@register_model
def steps_resnet18(pretrained: bool = False, **kwargs) -> StepsResNet:
    """Steps-ResNet-18 of Table 1, 18 blocks."""
    return _create("steps_resnet18", pretrained, **kwargs)


@register_model
def steps_resnet34(pretrained: bool = False, **kwargs) -> StepsResNet:
    """Steps-ResNet-34 of Table 1, 34 blocks."""
    return _create("steps_resnet34", pretrained, **kwargs)


@register_model
def steps_resnet50(pretrained: bool = False, **kwargs) -> StepsResNet:
    """Steps-ResNet-50 of Table 1, 34 blocks."""
    return _create("steps_resnet50", pretrained, **kwargs)


@register_model
def test_steps_resnet(pretrained: bool = False, **kwargs) -> StepsResNet:
    """A small model for tests, whose widest step has no blocks."""
    return _create("test_steps_resnet", pretrained, **kwargs)


@register_model
def test_steps_resnet_baseline(pretrained: bool = False, **kwargs) -> StepsResNet:
    """The same with one step per stage."""
    return _create("test_steps_resnet_baseline", pretrained, **kwargs)
