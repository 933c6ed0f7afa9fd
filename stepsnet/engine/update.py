"""One update of the weights: forward and backward passes, mean over ranks, checks, clipping, optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..device import autocast
from ..errors import UserError, is_out_of_memory
from ..settings.config import TrainingSettings
from .distributed import DistributedContext, full_tensor, unwrap
from .optim import scaled_lr
from .randomness import seed_step
from .task import BatchShard, Task

__all__ = ["Diverged", "Update", "Updater", "diverged"]


@dataclass(frozen=True)
class Update:
    """The result of an update: means over the whole batch, equal on all ranks."""

    means: dict[str, float]  # "loss" and the task's other means
    grad_norm: float  # before clipping
    interrupted: bool  # whether any rank has received a signal to stop


class Updater:
    """Applies updates. Besides the weights and the batch, an update depends on its number alone."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        schedule: Any,
        settings: TrainingSettings,
        context: DistributedContext,
        averages: ModelEmaV3 | None,
    ):
        self.model, self.task, self.optimizer, self.schedule = model, task, optimizer, schedule
        self.settings, self.context, self.averages = settings, context, averages
        self.parameters = list(model.parameters())  # listing those of a deep model takes a millisecond
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=settings.amp_dtype == "float16")

    def __call__(self, step: int, batches: Iterable[Any], caught: Sequence[int] = ()) -> Update:
        """Make update number ``step``, counted from 0.

        Args:
            batches: this rank's micro-batches; each is asked for when the one before is done.
            caught: the signals that have come.

        Raises:
            UserError: the loss or a gradient is not finite, the batch does not fit into memory, or micro-batches are
                missing; the weights stay as they were.
        """
        self.schedule.step_update(step)
        try:
            means, norm = self._gradients(step, batches)
        except RuntimeError as error:  # the CPU's allocator raises no class of its own
            if is_out_of_memory(error):
                raise UserError(self._too_large(error)) from None
            raise
        # made on the device: there is no copy to wait for
        interrupted = torch.full((), float(bool(caught)), device=self.context.device)
        shared = {**means, "grad_norm": full_tensor(norm), "interrupted": interrupted}
        values = dict(zip(shared, self.context.mean(list(shared.values()))))  # not finite if any rank's is not
        grad_norm, stops = values.pop("grad_norm"), values.pop("interrupted") > 0
        if not math.isfinite(values["loss"]) or not (math.isfinite(grad_norm) or self._may_scale_down()):
            raise self._not_finite(step, values["loss"], grad_norm)
        if self.settings.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.settings.clip_grad, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.averages:
            self.averages.update(unwrap(self.model))
        return Update(values, grad_norm, stops)

    def check_weights(self, step: int) -> None:
        """Raises UserError on every rank if a weight, or the average of one, is not finite after ``step`` updates.

        An update may overflow although its gradient is finite.
        """
        averaged = list(self.averages.module.parameters()) if self.averages else []
        wrong = ~torch.stack([_of_this_rank(p).isfinite().all() for p in self.parameters + averaged]).all()
        if any(self.context.mean([wrong])):
            raise diverged("weights", math.nan, step, self.settings)

    def _may_scale_down(self) -> bool:
        """Whether an update whose gradient overflows is skipped, as in float16, which then halves the loss scale.

        It is halved down to 1 only, so that a run whose gradients are never finite ends.
        """
        return self.scaler.is_enabled() and self.scaler.get_scale() > 1

    def _gradients(self, step: int, batches: Iterable[Any]) -> tuple[dict[str, Tensor], Tensor]:
        """This rank's means over its micro-batches, and the norm of the gradient over all ranks."""
        sums: dict[str, Tensor] = {}
        parts, done = self.settings.accumulation_steps, 0
        for part, batch in zip(range(parts), batches):
            last = part == parts - 1
            seed_step(self.settings.seed, step, self.context.rank, part)
            with self._without_exchange(not last):
                with autocast(self.settings.amp_dtype, self.context.device):
                    loss, others = self.task.loss(self.model, batch)
                self.scaler.scale(loss / parts).backward()
            for name, mean in {"loss": loss, **others}.items():
                sums[name] = sums.get(name, 0) + mean.detach() / parts
            done += 1
        if done < parts:
            got = f"got {done} micro-batches for update {step + 1}"
            raise UserError(f"batches of {type(self.task).__name__}: {got}, expected {parts}")
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return sums, nn.utils.get_total_norm(gradients)  # sharded gradients: a DTensor

    def _without_exchange(self, keep: bool):
        """Leave out the exchange between ranks, which only the last of the accumulated parts needs."""
        if isinstance(self.model, DistributedDataParallel) and keep:
            return self.model.no_sync()
        return nullcontext()

    def _not_finite(self, step: int, loss: float, norm: float) -> Diverged:
        what, value = ("loss", loss) if not math.isfinite(loss) else ("gradient", norm)
        where = dict.fromkeys(self.context.gather_objects(self._first_not_finite(step)))
        return diverged(what, value, step + 1, self.settings, "; " + "; ".join(where))

    def _first_not_finite(self, step: int) -> str:
        """Find the first module whose output is not finite, and say so.

        The update has not kept its micro-batches, so they are loaded again.
        """
        found: list[str] = []

        def look(name: str):
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                tensors = output if isinstance(output, (tuple, list)) else [output]
                if not found and any(isinstance(t, Tensor) and not torch.isfinite(t).all() for t in tensors):
                    found.append(name)

            return hook

        model = unwrap(self.model)
        hooks = [module.register_forward_hook(look(name or "the model")) for name, module in model.named_modules()]
        shard = BatchShard(self.context.rank, self.context.world_size, self.settings.accumulation_steps)
        epoch, done = divmod(step, self.task.steps_per_epoch)
        batches = self.task.batches(epoch, done, shard, self.context.device)
        try:
            with torch.no_grad(), autocast(self.settings.amp_dtype, self.context.device), closing(batches):
                for part, batch in zip(range(shard.accumulation_steps), batches):
                    seed_step(self.settings.seed, step, self.context.rank, part)
                    self.task.loss(self.model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        if found:
            return f"the first module whose output is not finite is {found[0]}"
        # each rank looks at its own shards: another one may have found a module, and would join no exchange
        broken = [
            name
            for name, p in model.named_parameters()
            if p.grad is not None and not _of_this_rank(p.grad).isfinite().all()
        ]
        if broken:  # the backward pass goes from the last parameter to the first
            return (
                f"every module's output is finite on rank {self.context.rank}, but the gradient of {broken[-1]} is not"
            )
        return f"every module's output is finite on rank {self.context.rank}"

    def _too_large(self, error: Exception) -> str:
        micro = self.settings.batch_size // (self.context.world_size * self.settings.accumulation_steps)
        return (
            f"memory: a forward pass of {micro} samples does not fit ({str(error).splitlines()[0]}); raise "
            f"accumulation_steps (now {self.settings.accumulation_steps}; the effective batch stays "
            f"{self.settings.batch_size}) or grad_checkpointing (now {self.settings.grad_checkpointing}"
            f"{'; it needs cuda_graph=false' * self.settings.cuda_graph}), or lower batch_size"
        )


def _of_this_rank(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank has; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Diverged(UserError):
    """A number of a run is not finite; ``step`` is the update at which it was found."""

    status = 3

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


def diverged(what: str, value: float, step: int, settings: TrainingSettings, more: str = "") -> Diverged:
    """The error that ends a run whose numbers are not finite."""
    return Diverged(
        f"{what}: got {value} at update {step}, expected a finite number{more}; the last checkpoint is kept; "
        f"try a new run with a lower lr (now {scaled_lr(settings):g}), longer warmup_epochs or clip_grad",
        step,
    )
