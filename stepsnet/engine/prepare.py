"""A model made ready to train: recomputed and compiled blocks, averaged weights, DDP or FSDP, and its optimizer."""

from __future__ import annotations

import torch
from timm.utils import ModelEmaV3
from torch import nn

from ..errors import UserError
from ..models.blocks import blocks_to_recompute, recompute_blocks
from ..models.cuda_graph import GraphedInference, GraphedTraining
from ..models.optimize import optimize
from ..settings.config import TrainingSettings
from .distributed import DistributedContext, parallelize
from .optim import build_optimizer
from .train_state import TrainState

__all__ = ["prepare"]


def prepare(model: nn.Module, settings: TrainingSettings, context: DistributedContext) -> tuple[TrainState, nn.Module]:
    """Move the model to its device, apply what the settings ask for, and build its optimizer.

    Returns:
        The state that checkpoints save, and the model as it is called in training, with DDP or FSDP around it.
    """
    if settings.parallel == "fsdp" and settings.amp_dtype == "float16":
        raise UserError(
            "amp_dtype: got float16 with parallel=fsdp, expected bfloat16: ranks would scale their losses differently"
        )
    _check_cuda_graph(settings, context)
    model.to(context.device)
    sharded = context.world_size > 1 and settings.parallel == "fsdp"
    averages = None
    if settings.ema_decay is not None:
        # timm averages buffers too by going through the state dict, in which tied weights are twice: they would be
        # averaged twice
        tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
        # one by one if weights are sharded: batch norms' statistics are not
        averages = ModelEmaV3(model, decay=settings.ema_decay, foreach=not sharded, exclude_buffers=tied)
    chosen = blocks_to_recompute(model, settings.grad_checkpointing)
    if settings.compile:
        optimize(model, "training", recomputed=chosen)
    if sharded:
        model.to(memory_format=torch.contiguous_format)  # FSDP takes no channels-last weights
    recompute_blocks(chosen)
    if settings.cuda_graph:
        model.forward = GraphedTraining(model, model.__dict__.get("forward"))
        if averages:
            averages.module.forward = GraphedInference(averages.module, averages.module.__dict__.get("forward"))
    wrapped = parallelize(model, settings.parallel, context)
    if averages and sharded:
        parallelize(averages.module, settings.parallel, context)
    # after the weights are sharded: the optimizer holds the parameters themselves
    return TrainState(model, build_optimizer(model, settings), averages, context, sharded), wrapped


def _check_cuda_graph(settings: TrainingSettings, context: DistributedContext) -> None:
    """Raises UserError for what cannot be captured in a graph."""
    if not settings.cuda_graph:
        return
    if context.device.type != "cuda":
        raise UserError(f"cuda_graph: got true on {context.device.type}, expected false, or a CUDA device")
    if settings.grad_checkpointing:
        got = f"true with grad_checkpointing={settings.grad_checkpointing}"
        raise UserError(
            f"cuda_graph: got {got}, expected only one of the two: a graph keeps the memory of its activations"
        )
    if context.world_size > 1:  # the hooks that DDP puts on the weights are on a stream that cannot be captured
        raise UserError(f"cuda_graph: got true with {context.world_size} ranks, expected one")
