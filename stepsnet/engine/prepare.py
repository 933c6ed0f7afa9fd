"""A model made ready to train: recomputed and compiled blocks, averaged weights, DDP or FSDP, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath
from timm.utils import ModelEmaV3
from torch import nn

from ..config import TrainingSettings
from ..errors import UserError
from ..models.blocks import blocks_of, recompute_blocks
from ..residual.connected import ConnectedBlock
from .distributed import DistributedContext, parallelize
from .optim import build_optimizer
from .train_state import TrainState

__all__ = ["blocks_to_recompute", "compile_blocks", "prepare"]


def prepare(model: nn.Module, settings: TrainingSettings, context: DistributedContext) -> tuple[TrainState, nn.Module]:
    """The model on its device with what the settings put around it, and its optimizer."""
    if settings.parallel == "fsdp" and settings.amp_dtype == "float16":
        raise UserError("amp_dtype: got float16 with parallel=fsdp, expected bfloat16: ranks would scale differently")
    if settings.stream_interval and settings.compile:
        raise UserError(f"stream_interval: got {settings.stream_interval} with compile, which leaves hooks out")
    model.to(context.device)
    sharded = context.world_size > 1 and settings.parallel == "fsdp"
    averages = None
    if settings.ema_decay is not None:
        # what is tied is twice in a state dict, by which timm averages statistics too, and would be averaged twice
        tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
        # batch norms' statistics are not sharded as weights are: one by one then
        averages = ModelEmaV3(model, decay=settings.ema_decay, foreach=not sharded, exclude_buffers=tied)
    chosen = blocks_to_recompute(model, settings.grad_checkpointing)
    if settings.compile:
        compile_blocks(model, chosen)
    recompute_blocks(chosen)
    wrapped = parallelize(model, settings.parallel, context)
    if averages and sharded:
        parallelize(averages.module, settings.parallel, context)
    # after the weights are sharded: the optimizer holds the parameters themselves
    return TrainState(model, build_optimizer(model, settings), averages, context, sharded), wrapped


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


def compile_blocks(model: nn.Module, recomputed: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """``torch.compile`` each block in place: the blocks of a width share their graphs, whatever the depth.

    Stochastic depth stays outside: its rate differs from block to block, and dynamo would take each for a
    constant and compile every block anew.

    Args:
        recomputed: blocks that :func:`recompute_blocks` gets afterwards. dynamo compiles nothing that runs
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
        # of a block whose arguments grow from block to block, what sees one shape
        parts = block.parts_to_compile() if isinstance(block, ConnectedBlock) else [block]
        for part in parts:
            if block in recomputed:
                part.forward = torch.compile(part.forward, **kwargs)
            else:
                part.compile(**kwargs)
