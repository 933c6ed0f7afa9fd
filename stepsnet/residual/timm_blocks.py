"""Designs that are another class of block in place of timm's, or an argument of it, in the Steps-DeiT models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor

from .design import check_options

__all__ = ["linears_of", "with_design"]


def with_design(
    name: str, design: Any, num_blocks: int, block_fn: Any, given: dict[str, Any], options: Mapping[str, Any]
) -> tuple[Any, dict]:
    """The block and the arguments of VisionTransformer for a design that has ``timm_block``.

    Args:
        num_blocks: blocks of the model, over all steps.
        block_fn: the block in use without a design.
        given: the arguments of VisionTransformer without a design.
        options: of the design.

    Raises:
        ValueError: an argument that the design sets itself.
        UserError: an unknown option.
    """
    options = check_options(name, design, options)
    design.check(0, 2 * num_blocks, options)
    conflicting = [name for name in ("init_values", "scale_attn_norm", "scale_mlp_norm") if given.get(name)]
    if conflicting or block_fn is not Block:
        raise ValueError(f"residual: got {name!r} with {(conflicting or ['block_fn'])[0]}, expected only one of them")
    if design.timm_block is Block:  # LayerScale, which timm's Block has an argument for
        return block_fn, {**given, "init_values": options["initial"] or design.initial(num_blocks)}
    return partial(design.timm_block, num_blocks=num_blocks), given


def linears_of(block: Block) -> list[Tensor]:
    """Views of the weights of queries, keys, values, projection, and the two layers of the MLP."""
    assert isinstance(block.mlp, Mlp)
    qkv = block.attn.qkv.weight.detach().chunk(3)  # timm keeps the three in one (3C, C) weight
    return [*qkv, *(layer.weight.detach() for layer in (block.attn.proj, block.mlp.fc1, block.mlp.fc2))]
