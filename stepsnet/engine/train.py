"""The training loop: from a model, a task and settings to weights, resumable at every update."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .checkpoint import load_newest, save_checkpoint
from .optim import build_optimizer, build_schedule
from .randomness import seed_step
from .settings import TrainingSettings
from .task import Task

__all__ = ["Stopped", "fit", "pick_device"]

Report = Callable[[dict[str, Any]], None]
Probe = Callable[[nn.Module], dict[str, Any]]


class Stopped(Exception):
    """A signal ended the run after a whole update and a checkpoint; ``status`` is 128 + its number."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} after update {step}; --resume goes on from there")
        self.status = 128 + number


@dataclass
class Position:
    """Where a run is: all of a checkpoint that is neither weights nor optimizer."""

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)  # of the epoch's means so far
    seconds: float = 0.0  # spent in updates
    metrics_bytes: int = 0  # length of metrics.jsonl


def pick_device(name: str) -> torch.device:
    """Raises UserError for a device that is not there."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: got {name!r}, expected one that is there: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def fit(
    model: nn.Module,
    task: Task,
    settings: TrainingSettings,
    folder: Path,
    *,
    report: Report,
    probe: Probe | None = None,
) -> dict[str, float]:
    """Train ``model`` on ``task`` in ``folder``, from its newest checkpoint if it has one.

    Writes ``metrics.jsonl`` and ``checkpoints/``; returns the last epoch's metrics.

    Raises:
        Stopped: on SIGINT or SIGTERM, after the update and a checkpoint.
        UserError: the loss is not finite, or the folder cannot be written.
    """
    with signals_caught() as caught:
        return _fit(model, task, settings, folder, report, probe, caught)


def _fit(
    model: nn.Module,
    task: Task,
    settings: TrainingSettings,
    folder: Path,
    report: Report,
    probe: Probe | None,
    caught: list[int],
) -> dict[str, float]:
    device = pick_device(settings.device)
    model.to(device)
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings, task.steps_per_epoch)
    metrics, position, checkpoints = folder / "metrics.jsonl", Position(), folder / "checkpoints"
    newest = load_newest(checkpoints, device)
    if newest:
        weights, state, passed_over = newest
        for reason in passed_over:
            report({"kind": "note", "text": reason})
        load_strictly(model, weights)
        optimizer.load_state_dict(state["optimizer"])
        position = Position(**state["position"])
        report({"kind": "note", "text": f"resumed after update {position.step}"})
    metrics.touch()
    with metrics.open("r+") as file:
        file.truncate(position.metrics_bytes)  # what a killed run wrote after its last checkpoint

    def checkpoint() -> None:
        position.metrics_bytes = metrics.stat().st_size
        state = {"optimizer": optimizer.state_dict(), "position": vars(position)}
        save_checkpoint(checkpoints, position.step, model.state_dict(), state, settings.keep_checkpoints)

    def record(line: dict[str, Any]) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def look_inside(epoch: int) -> None:
        if probe and settings.probe_epochs and epoch % settings.probe_epochs == 0:
            record({"epoch": epoch, "step": position.step, **probe(model)})

    if position.step == 0:
        look_inside(0)
    first_epoch, done = divmod(position.step, task.steps_per_epoch)
    for epoch in range(first_epoch, settings.epochs):
        model.train()
        shown = 0.0
        for batch in task.batches(epoch, done, device):
            started = time.perf_counter()
            loss = _update(model, task, batch, optimizer, schedule, settings, position)
            position.seconds += time.perf_counter() - started
            if caught and position.step % task.steps_per_epoch:  # else the epoch is closed first
                checkpoint()
                raise Stopped(caught[0], position.step)
            if time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                report(_progress(epoch, loss, position, task, settings))
        done = 0
        means = {f"train_{name}": total / task.steps_per_epoch for name, total in position.sums.items()}
        model.eval()
        evaluated = {f"val_{name}": value for name, value in task.evaluate(model, device).items()}
        line = {
            "kind": "epoch",
            "epoch": epoch + 1,
            "step": position.step,
            "lr": optimizer.param_groups[0]["lr"],
            **means,
            **evaluated,
            "samples_per_second": position.step * task.batch_size / position.seconds,
        }
        record(line)
        look_inside(epoch + 1)
        position.sums = {}
        checkpoint()
        progress = _progress(epoch, line["train_loss"], position, task, settings)
        report({**progress, **evaluated, "top1": evaluated.get("val_top1", math.nan)})
        report({**progress, **line})
        if caught:
            raise Stopped(caught[0], position.step)
    recorded = [json.loads(text) for text in metrics.read_text().splitlines()]
    epochs = [entry for entry in recorded if entry["kind"] == "epoch"]
    return {name: value for name, value in epochs[-1].items() if name.startswith(("train_", "val_"))} if epochs else {}


def _update(model, task, batch, optimizer, schedule, settings: TrainingSettings, position: Position) -> float:
    """One update; returns its loss."""
    schedule.step_update(position.step)
    seed_step(settings.seed, position.step)
    loss, others = task.loss(model, batch)
    value = loss.item()
    if not math.isfinite(value):
        raise UserError(
            f"loss: got {value} at update {position.step + 1}, expected a finite number; the last checkpoint "
            "is kept: lower lr, lengthen warmup_epochs or set clip_grad"
        )
    loss.backward()
    if settings.clip_grad is not None:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    position.step += 1
    for name, mean in {"loss": loss, **others}.items():
        position.sums[name] = position.sums.get(name, 0.0) + mean.item()
    return value


def _progress(epoch: int, loss: float, position: Position, task: Task, settings: TrainingSettings) -> dict[str, Any]:
    steps = settings.epochs * task.steps_per_epoch
    in_epoch = position.step - epoch * task.steps_per_epoch
    return {
        "kind": "progress",
        "epoch": epoch + 1,
        "epochs": settings.epochs,
        "step": position.step,
        "steps": steps,
        "loss": loss,
        **{name: total / max(in_epoch, 1) for name, total in position.sums.items() if name != "loss"},
        "samples_per_second": position.step * task.batch_size / position.seconds,
        "seconds_left": (steps - position.step) * position.seconds / position.step,
    }


def load_strictly(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Raises UserError with the first tensors that differ, where ``load_state_dict`` prints them all."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    got = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    if differing:
        first = "; ".join(f"{n} {got.get(n, 'missing')}, expected {expected.get(n, 'none')}" for n in differing[:3])
        raise UserError(f"checkpoint: {len(differing)} tensors do not fit the model: got {first}")
    model.load_state_dict(weights)


@contextmanager
def signals_caught() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that a whole update and a checkpoint come before the end."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, lambda received, frame: caught.append(received)) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
