"""The optimizer and the schedule, timm's, from a run's settings."""

from __future__ import annotations

import timm.optim
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from ..errors import UserError, nearest
from .settings import TrainingSettings

__all__ = ["build_optimizer", "build_schedule"]


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> Optimizer:
    """timm's optimizer of that name; norms, biases and ``model.no_weight_decay()`` are not decayed.

    Raises:
        UserError: timm has no optimizer of that name.
    """
    known = timm.optim.list_optimizers()
    if settings.opt not in known:
        raise UserError(f"opt: got {settings.opt!r}, expected one of timm's optimizers{nearest(settings.opt, known)}")
    arguments = {"betas": settings.betas, "eps": settings.eps} if "adam" in settings.opt else {}
    if settings.opt == "adamw":
        arguments["fused"] = True  # deep and narrow is a thousand small tensors
    return timm.optim.create_optimizer_v2(
        model, opt=settings.opt, lr=settings.lr, weight_decay=settings.weight_decay, **arguments
    )


def build_schedule(optimizer: Optimizer, settings: TrainingSettings, steps_per_epoch: int) -> CosineLRScheduler:
    """Linear warm-up and a cosine, by update: ``step_update(step)`` sets the rates, whatever came before."""
    return CosineLRScheduler(
        optimizer,
        t_initial=settings.epochs * steps_per_epoch,
        lr_min=settings.min_lr,
        warmup_t=round(settings.warmup_epochs * steps_per_epoch),
        warmup_lr_init=settings.warmup_lr,
        t_in_epochs=False,
    )
