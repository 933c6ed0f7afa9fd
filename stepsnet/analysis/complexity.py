"""Blocks, layers, parameters and multiply-accumulates, counted by the paper's conventions.

What the paper calls FLOPs are multiply-accumulates (MACs) of convolutions, linear layers and both
attention products, plus 5 per element of an affine LayerNorm and 2 per element of a BatchNorm, as
fvcore counts. Layers are convolutions and linear layers, and one for each attention (Table 1).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models import beit, eva, metaformer, swin_transformer_v2
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block
from torch import nn

from ..errors import UserError, in_a_line
from ..macs import OF_MODULES, count_forward
from ..models.blocks import blocks_of, step_sequences, widths_of

__all__ = [
    "Complexity",
    "count_complexity",
    "count_detector",
    "count_language_model",
    "count_layers",
    "count_macs",
    "detector_macs",
]

RESIDUAL_BLOCKS = (BasicBlock, Bottleneck, Block, SwinTransformerBlock)
ATTENTION = (
    *(Attention, AttentionRope, WindowAttention, beit.Attention, eva.EvaAttention),
    *(metaformer.Attention, swin_transformer_v2.WindowAttention),
)


@dataclass(frozen=True)
class Complexity:
    blocks: int | None  # residual ones; None if their number is not certain
    layers: int
    params: int
    macs: int  # of one forward pass of one sample


def count_complexity(model: nn.Module, input_size: tuple[int, ...] = (3, 224, 224)) -> Complexity:
    """Count a model on any device, including the meta device; nothing is computed and nothing changed.

    In a user's own model, which does not have timm's groups, the blocks are those of its sequence.
    """
    own = 0 if hasattr(model, "group_matcher") else len(blocks_of(model))
    return Complexity(
        blocks=_count_blocks(model) or own or None,
        layers=count_layers(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=count_macs(model, input_size),
    )


def count_language_model(model: Any, context: int) -> Complexity:
    """The paper's counts: 5 layers per block, plus the head; tied weights once. MACs are those of one token.

    For another transformers model, layers and MACs are counted as for any model.

    Args:
        context: the number of tokens that attention looks at. Its two products take 2·context·C in a layer of width C,
            as in Eq. (3); what a causal mask hides is counted too.

    Raises:
        UserError: the model does not run without data.
    """
    params = sum(parameter.numel() for parameter in model.parameters())
    is_of_the_paper = model.config.model_type == "steps_transformer"
    blocks = len(blocks_of(model))
    if not is_of_the_paper or model.config.residual != "plain":  # includes the products of the design
        macs = _macs_of_sequence(model, context) // context
    else:
        # layers beyond num_hidden_layers are kept, but do not run
        waiting = {part for layer in model.base_model.layers[blocks:] for part in layer.modules()}
        linear = sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear) and module not in waiting
        )
        macs = linear + sum(2 * context * width for width in widths_of(model))
    return Complexity(blocks, 5 * blocks + 1 if is_of_the_paper else count_layers(model), params, macs)


def _macs_of_sequence(model: Any, tokens: int) -> int:
    from ..models.stepify.of_transformers import token_example  # imports transformers, which other models do without

    try:
        return token_example(model, tokens).macs(model)
    except OF_MODULES as error:
        try:  # OPT, BLOOM and GPT expect a mask of one entry per token, and look at no data if given none
            return token_example(model, tokens, whole_mask=False).macs(model)
        except OF_MODULES:
            raise UserError(
                f"model: the multiply-accumulates of {type(model).__name__} cannot be counted ({in_a_line(error)})"
            ) from error


def count_detector(model: Any, input_size: tuple[int, int, int] = (3, 800, 1280)) -> Complexity:
    """Count a whole detector on one image, with MACs by :func:`detector_macs`; blocks are the backbone's."""
    return Complexity(
        blocks=_count_blocks(model),
        layers=count_layers(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=sum(detector_macs(model, input_size).values()),
    )


def detector_macs(model: Any, input_size: tuple[int, int, int] = (3, 800, 1280)) -> dict[str, int]:
    """Multiply-accumulates of a detector's parts for one image, by the conventions of the published numbers.

    Those come from mmdetection's counter: backbone, FPN and the RPN's head on the image, each stage's box head
    on 1,000 boxes and each stage's mask head on 100; selecting, cropping and merging boxes is not counted.
    """
    pyramid, stages = model.backbone, getattr(model.roi_heads, "stages", [model.roi_heads])
    image = torch.empty(1, *input_size, device="meta")
    of_body, maps = count_forward(pyramid.body, image)
    of_fpn, levels = count_forward(pyramid.fpn, {str(level): x for level, x in enumerate(maps)})
    of_rpn, _ = count_forward(model.rpn.head, list(levels.values()))
    counts = {"backbone": of_body, "fpn": of_fpn, "rpn": of_rpn, "boxes": 0, "masks": 0}
    for stage in stages:
        parts = (
            ("boxes", 1000, stage.box_roi_pool, (stage.box_head, stage.box_predictor)),
            ("masks", 100, stage.mask_roi_pool, (stage.mask_head, stage.mask_predictor)),
        )
        for name, count, pool, modules in parts:
            if pool is None:  # no mask head
                continue
            x: Any = torch.empty(count, pyramid.out_channels, *pool.output_size, device="meta")
            for module in modules:
                macs, x = count_forward(module, x)
                counts[name] += macs
    return counts


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-accumulates of one forward pass in evaluation mode, for one sample of ``input_size``."""
    return count_forward(model, torch.empty(1, *input_size, device="meta"))[0]


def _count_blocks(model: nn.Module) -> int | None:
    """The number of residual blocks; None if it is not certain.

    Blocks of the paper's models are found by their class, others in the model's sequences. In a timm model without
    steps, their number has to be the one that timm's own groups give.
    """
    of_paper = sum(isinstance(module, RESIDUAL_BLOCKS) for module in model.modules())
    grouped = _grouped_by_timm(model)
    if step_sequences(model):
        return of_paper or len(blocks_of(model))
    if grouped is None:
        return of_paper or None
    return grouped if grouped == (of_paper or len(blocks_of(model))) else None


def _grouped_by_timm(model: nn.Module) -> int | None:
    """The number of blocks with learning rates of their own under timm's layer decay; None if timm does not say."""
    matcher = getattr(model, "group_matcher", None)
    groups = matcher(coarse=False) if matcher else None
    patterns = groups.get("blocks") if isinstance(groups, dict) else None  # some models' groups are a function
    if isinstance(patterns, str):
        patterns = [(patterns, None)]
    if not isinstance(patterns, (list, tuple)):
        return None
    counted = [pattern for pattern, place in patterns if place is None]  # the others are downsampling, norms, …
    names = [name for name, _ in model.named_parameters()]
    return len({(p, found.groups()) for p in counted for name in names if (found := re.match(p, name))}) or None


def count_layers(model: nn.Module) -> int:
    """Count convolutions and linear layers, plus one for each attention; the convolutions of shortcuts do not count."""
    shortcuts = {
        layer
        for block in model.modules()
        if isinstance(block, BasicBlock | Bottleneck) and block.downsample is not None
        for layer in block.downsample.modules()
    }
    of_transformers = sys.modules.get("transformers.pytorch_utils")
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, *ATTENTION, *([of_transformers.Conv1D] if of_transformers else []))
    attention = _attention_of_transformers(model)
    return attention + sum(isinstance(module, kinds) and module not in shortcuts for module in model.modules())


def _attention_of_transformers(model: nn.Module) -> int:
    """One for each layer of a model that has attention heads."""
    config = getattr(model, "config", None)
    return config.num_hidden_layers if hasattr(config, "num_attention_heads") else 0  # type: ignore[union-attr]
