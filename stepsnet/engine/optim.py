"""timm's optimizers and schedules, from a run's settings."""

from __future__ import annotations

import inspect
from dataclasses import replace

import timm.optim
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from ..errors import UserError, in_a_line, nearest
from ..output.terminal import silenced
from ..settings.config import TrainingSettings

__all__ = [
    "Schedule",
    "build_optimizer",
    "check_optimizer",
    "check_rates",
    "rate_at",
    "scaled_lr",
]


def scaled_lr(settings: TrainingSettings) -> float:
    """The rate for this batch size: ``lr`` is meant for ``lr_base_size`` samples per update, if that is given."""
    if settings.lr_base_size is None:
        return settings.lr
    ratio = settings.batch_size / settings.lr_base_size
    return settings.lr * (ratio if settings.lr_base_scale == "linear" else ratio**0.5)


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> Optimizer:
    """timm's optimizer named ``opt``; norms, biases and ``model.no_weight_decay()`` are not decayed.

    With ``layer_decay`` the groups come from ``model.group_matcher()``, whose layers are blocks.

    Raises:
        UserError: timm has no such optimizer or it does not take these settings, or the model has no layers for
            ``layer_decay``.
    """
    if settings.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise UserError(f"layer_decay: got {settings.layer_decay}, expected null: the model names no layers")
    check_optimizer(settings)
    return _create(model, settings)


def check_optimizer(settings: TrainingSettings) -> None:
    """Try one update of a small matrix and a vector, with the optimizer that a model would get.

    Raises:
        UserError: timm has no such optimizer, or it does not take these settings.
    """
    known = timm.optim.list_optimizers()
    if settings.opt not in known:
        raise UserError(f"opt: got {settings.opt!r}, expected one of timm's optimizers{nearest(settings.opt, known)}")
    takes = timm.optim.get_optimizer_info(settings.opt)
    if takes.second_order:
        raise UserError(f"opt: got {settings.opt!r}, expected an optimizer that needs no second derivatives")
    if settings.betas is not None and takes.has_betas and takes.num_betas != 2:
        raise UserError(f"betas: got {settings.betas}, expected null: {settings.opt} has {takes.num_betas} of them")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        toy = nn.Linear(2, 2)
        toy(torch.ones(1, 2)).sum().backward()
        try:
            _create(toy, replace(settings, layer_decay=None)).step()
        except Exception as error:  # whatever timm, torch or a package that the optimizer needs raises
            raise UserError(f"opt: {settings.opt} does not take these settings: {in_a_line(error)}") from error


def _create(model: nn.Module, settings: TrainingSettings) -> Optimizer:
    takes = timm.optim.get_optimizer_info(settings.opt)
    arguments: dict = {"momentum": settings.momentum} if takes.has_momentum else {}
    if settings.betas is not None and takes.has_betas:
        arguments["betas"] = settings.betas
    if settings.eps is not None and takes.has_eps:
        arguments["eps"] = settings.eps
    if settings.opt == "adamw":
        arguments["fused"] = True  # a deep, narrow model has a thousand small tensors
    if "max_grad_norm" in inspect.signature(timm.optim.get_optimizer_class(settings.opt, False)).parameters:
        arguments["max_grad_norm"] = None  # LAMB's own clipping, at 1: ``clip_grad`` alone decides
    return timm.optim.create_optimizer_v2(
        model,
        opt=settings.opt,
        lr=scaled_lr(settings),
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        **arguments,
    )


def check_rates(settings: TrainingSettings) -> None:
    """Raises UserError for a schedule that begins or ends above ``lr``."""
    for name, rate in {"warmup_lr": settings.warmup_lr, "min_lr": settings.min_lr}.items():
        used = settings.warmup_epochs > 0 if name == "warmup_lr" else settings.sched != "multistep"
        if used and rate > settings.lr:
            raise UserError(f"{name}: got {rate:g}, expected at most lr, {settings.lr:g}")


class Schedule:
    """The rates of an optimizer, as a function of the update alone, whatever came before.

    A linear warm-up, then a cosine, a polynomial or steps, by update. ``warmup_lr`` and ``min_lr`` are scaled like
    ``lr``.
    """

    def __init__(self, optimizer: Optimizer, settings: TrainingSettings, steps_per_epoch: int):
        self.scheduler = _scheduler(optimizer, settings, steps_per_epoch)
        self.settings, self.steps_per_epoch = settings, steps_per_epoch

    def step_update(self, step: int) -> None:
        """Set the rates of update number ``step``, counted from 0."""
        # a run may have been resumed with other epochs; timm's milestones do not depend on the length
        self.scheduler.t_initial = self.settings.epochs_at(step) * self.steps_per_epoch
        self.scheduler.step_update(step)


def rate_at(settings: TrainingSettings, step: int, steps_per_epoch: int) -> float:
    """The learning rate of update number ``step``, counted from 0."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=scaled_lr(settings))
    Schedule(optimizer, settings, steps_per_epoch).step_update(step)
    return optimizer.param_groups[0]["lr"]


def _scheduler(optimizer: Optimizer, settings: TrainingSettings, steps_per_epoch: int) -> Scheduler:
    scale = scaled_lr(settings) / settings.lr if settings.lr else 1.0
    shared: dict = {
        "warmup_t": round(settings.warmup_epochs * steps_per_epoch),
        "warmup_lr_init": settings.warmup_lr * scale,
        "t_in_epochs": False,
    }
    if settings.sched == "multistep":
        # timm's milestones count from 1, and the warm-up is part of the epochs here
        after = [round(epochs * steps_per_epoch) + 1 for epochs in sorted(settings.milestones)]
        return MultiStepLRScheduler(optimizer, after, decay_rate=settings.decay_rate, warmup_prefix=False, **shared)
    shared |= {"t_initial": settings.epochs * steps_per_epoch, "lr_min": settings.min_lr * scale}
    kind, more = (
        (PolyLRScheduler, {"power": settings.poly_power}) if settings.sched == "poly" else (CosineLRScheduler, {})
    )
    with silenced("timm.scheduler"):  # which warns about a schedule of one update
        return kind(optimizer, **shared, **more)
