"""What is done to a model's residual blocks before training: recomputation and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath
from torch import nn

from ..errors import UserError
from ..stream import blocks_of, recompute_blocks

__all__ = ["blocks_to_recompute", "compile_blocks", "recompute_blocks"]


def blocks_to_recompute(model: nn.Module, chosen: float | tuple[int, ...]) -> list[nn.Module]:
    """The first ``chosen`` share of the model's blocks, or those of the listed steps, counted from 1.

    Raises:
        UserError: no sequence of blocks is found in the model, or it has no such step.
    """
    if not isinstance(chosen, tuple):
        blocks = blocks_of(model)
        if chosen and not blocks:
            raise UserError(f"grad_checkpointing: got {chosen}, but no sequence of blocks was found in the model")
        return blocks[: round(chosen * len(blocks))]
    try:
        return blocks_of(model, chosen)
    except ValueError as error:
        raise UserError(f"grad_checkpointing: {error}") from None


def compile_blocks(model: nn.Module, recomputed_ones: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """``torch.compile`` each block in place: the blocks of a width share their graphs, whatever the depth.

    Stochastic depth stays outside: its rate differs from block to block, and dynamo would take each for a
    constant and compile every block anew.

    Args:
        recomputed_ones: blocks that :func:`recompute_blocks` gets afterwards. dynamo compiles nothing that runs
            inside a checkpoint's function unless it was compiled before.
        **kwargs: ``torch.compile``'s.

    Raises:
        UserError: no sequence of blocks is found in the model.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("compile: no sequence of blocks was found in the model")
    for module in model.modules():
        if isinstance(module, DropPath):
            module.forward = torch.compiler.disable(module.forward)
    for block in blocks:
        if block in recomputed_ones:
            block.forward = torch.compile(block.forward, **kwargs)
        else:
            block.compile(**kwargs)
