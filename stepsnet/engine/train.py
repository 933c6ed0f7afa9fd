"""The training loop: from a model, a task and settings to weights, resumable at every update."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers import DropPath
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from ..errors import UserError
from ..stream import blocks_of
from .checkpoint import Trained, newest, whole_weights
from .distributed import Ranks, share_first_buffers, spread
from .optim import build_optimizer, build_schedule, scaled_lr
from .settings import TrainingSettings
from .task import Share, Task
from .tracking import Tracker, open_trackers, scalars
from .update import Updater, autocast, bare

__all__ = ["Fitted", "Stopped", "compile_blocks", "fit", "recompute_blocks", "signals_caught"]

Report = Callable[[dict[str, Any]], None]
Probe = Callable[[nn.Module], dict[str, Any]]
Watch = Callable[[nn.Module, float], AbstractContextManager[dict[str, Any]]]  # looks on while the loss, times so much,
# goes forwards and backwards, and ends with a line for the metrics


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
    best: float = -math.inf  # of the task's measure, or of its negative where lower is better
    best_step: int | None = None


@dataclass(frozen=True)
class Fitted:
    """A run that has come to its end."""

    metrics: dict[str, float]  # of the last epoch
    weights: dict[str, torch.Tensor]  # those that were evaluated, on rank 0; elsewhere nothing
    best_step: int | None  # whose checkpoint is kept


def fit(
    model: nn.Module,
    task: Task,
    settings: TrainingSettings,
    folder: Path,
    ranks: Ranks,
    *,
    report: Report,
    probe: Probe | None = None,
    watch: Watch | None = None,
) -> Fitted:
    """Train ``model`` on ``task`` in ``folder``, from its newest checkpoint if it has one.

    Every rank calls it. Rank 0 writes ``metrics.jsonl`` and ``checkpoints/`` and reports.

    Raises:
        Stopped: on SIGINT or SIGTERM, after the update and a checkpoint.
        UserError: the loss is not finite, a batch does not fit, or the folder cannot be written.
    """
    with signals_caught() as caught:
        return _fit(model, task, settings, folder, ranks, report if ranks.first else _say_nothing, probe, watch, caught)


def _fit(
    model: nn.Module,
    task: Task,
    settings: TrainingSettings,
    folder: Path,
    ranks: Ranks,
    report: Report,
    probe: Probe | None,
    watch: Watch | None,
    caught: list[int],
) -> Fitted:
    share = Share(ranks.rank, ranks.world_size, settings.accumulation_steps)
    share.micro_batch_size(task.batch_size)
    trained, wrapped = _prepare(model, settings, ranks)
    schedule = build_schedule(trained.optimizer, settings, task.steps_per_epoch)
    updater = Updater(wrapped, task, trained.optimizer, schedule, settings, ranks, trained.averages)
    evaluated_model = trained.averages.module if trained.averages else wrapped
    position, checkpoints = Position(), folder / "checkpoints"
    report({"kind": "note", "text": _batch_line(settings, ranks, task)})
    found, passed_over = newest(checkpoints)
    for reason in passed_over:
        report({"kind": "note", "text": reason})
    if found:
        trained.restore(found)
        updater.scaler.load_state_dict(found.state["scaler"])
        position = Position(**found.state["position"])
        report({"kind": "note", "text": f"resumed after update {position.step}"})
    trackers = open_trackers(settings.tracker, folder, position.step, asdict(settings)) if ranks.first else []
    metrics = _Metrics(folder / "metrics.jsonl", position.metrics_bytes, ranks.first, trackers)

    def save() -> None:
        position.metrics_bytes = ranks.from_first(metrics.size)
        share_first_buffers(ranks, model, evaluated_model)
        state = {"position": vars(position), "scaler": updater.scaler.state_dict()}
        trained.save(checkpoints, position.step, state, settings.keep_checkpoints, position.best_step)

    def look_inside(epoch: int) -> None:
        if probe and settings.probe_epochs and epoch % settings.probe_epochs == 0:  # on every rank, as FSDP asks
            metrics.add({"epoch": epoch, "step": position.step, **probe(bare(evaluated_model))})

    def watching(step: int) -> AbstractContextManager[dict[str, Any]]:
        due = settings.signal_interval and (step == 1 or step % settings.signal_interval == 0)
        if not (watch and due and ranks.first):
            return nullcontext({})
        return watch(model, updater.scaler.get_scale() / settings.accumulation_steps)

    def tell() -> None:
        for text in task.notices():
            report({"kind": "note", "text": text})

    tell()  # what the data's check has found
    if position.step == 0:
        look_inside(0)
    first_epoch, done = divmod(position.step, task.steps_per_epoch)
    if position.sums and not done:  # it was stopped between an epoch's last update and the evaluation
        first_epoch, done = first_epoch - 1, task.steps_per_epoch
    for epoch in range(first_epoch, settings.epochs):
        model.train()
        shown = 0.0
        micro_batches = iter(task.batches(epoch, done, share, ranks.device))
        updates = zip(*[micro_batches] * settings.accumulation_steps)  # so many at a time
        while True:
            started = time.perf_counter()
            if (batches := next(updates, None)) is None:
                break
            with watching(position.step + 1) as seen:
                update = updater(position.step, batches, caught)
            position.step += 1
            if seen:
                metrics.add({"epoch": epoch + 1, "step": position.step, **seen})
            for name, mean in update.means.items():
                position.sums[name] = position.sums.get(name, 0.0) + mean
            position.seconds += time.perf_counter() - started
            if position.step % settings.log_interval == 0:
                lr = max(group["lr"] for group in trained.optimizer.param_groups)
                line = {"kind": "step", "step": position.step, "epoch": epoch + 1, "lr": lr}
                metrics.add({**line, **update.means, "grad_norm": update.grad_norm})
            tell()
            inside = position.step % task.steps_per_epoch != 0  # else the epoch is closed first
            if update.signals:  # at an epoch's end too: torchrun waits for seconds, and an evaluation may take minutes
                save()
                raise Stopped(ranks.from_first(caught[0] if caught else signal.SIGTERM), position.step)
            if inside and settings.checkpoint_interval and position.step % settings.checkpoint_interval == 0:
                save()
            if time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                report(_progress(epoch, update.means["loss"], position, task, settings, trained))
        done = 0
        means = {f"train_{name}": total / task.steps_per_epoch for name, total in position.sums.items()}
        evaluated_model.eval()
        share_first_buffers(ranks, evaluated_model)
        with autocast(settings.amp_dtype, ranks.device):
            scores = task.evaluate(evaluated_model, share, ranks.device)
        of_training = {name: value for name, value in scores.items() if name.startswith("train_")}
        evaluated = {f"val_{name}": value for name, value in scores.items() if name not in of_training} | of_training
        score = -scores[task.monitor] if task.lower_is_better else scores[task.monitor]
        if score > position.best:
            position.best, position.best_step = score, position.step
        progress = _progress(epoch, means["train_loss"], position, task, settings, trained)
        kept = {name: progress[name] for name in ("lr", "samples_per_second", "memory_gib")}
        line = {"kind": "epoch", "epoch": epoch + 1, "step": position.step, **kept, **means, **evaluated}
        metrics.add(line)
        look_inside(epoch + 1)
        position.sums = {}
        save()
        report({**progress, **scores})
        report({**progress, **line})
        if any(ranks.mean([torch.tensor(float(bool(caught)))])):
            raise Stopped(ranks.from_first(caught[0] if caught else signal.SIGTERM), position.step)
    return Fitted(metrics.last_epoch(), whole_weights(evaluated_model), position.best_step)


def _prepare(model: nn.Module, settings: TrainingSettings, ranks: Ranks) -> tuple[Trained, nn.Module]:
    """The model on its device with what the settings put around it, and its optimizer."""
    if settings.parallel == "fsdp" and settings.amp_dtype == "float16":
        raise UserError("amp_dtype: got float16 with parallel=fsdp, expected bfloat16: ranks would scale differently")
    if settings.signal_interval and settings.compile:
        raise UserError(f"signal_interval: got {settings.signal_interval} with compile, which leaves hooks out")
    model.to(ranks.device)
    sharded = ranks.world_size > 1 and settings.parallel == "fsdp"
    averages = None
    if settings.ema_decay is not None:
        # what is tied is twice in a state dict, by which timm averages statistics too, and would be averaged twice
        tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
        # batch norms' statistics are not shared out as weights are: one by one then
        averages = ModelEmaV3(model, decay=settings.ema_decay, foreach=not sharded, exclude_buffers=tied)
    chosen = _recomputed_blocks(model, settings.grad_checkpointing)
    if settings.compile:
        compile_blocks(model, chosen)
    recompute_blocks(chosen)
    wrapped = spread(model, settings.parallel, ranks)
    if averages and sharded:
        spread(averages.module, settings.parallel, ranks)
    # after the weights are shared out: the optimizer holds the parameters themselves
    return Trained(model, build_optimizer(model, settings), averages, ranks, sharded), wrapped


def _recomputed_blocks(model: nn.Module, chosen: float | tuple[int, ...]) -> list[nn.Module]:
    if not isinstance(chosen, tuple):
        blocks = blocks_of(model)
        if chosen and not blocks:
            raise UserError(f"grad_checkpointing: got {chosen}, but no sequence of blocks was found in the model")
        return blocks[: round(chosen * len(blocks))]
    try:
        return blocks_of(model, chosen)
    except ValueError as error:
        raise UserError(f"grad_checkpointing: {error}") from None


def recompute_blocks(blocks: Sequence[nn.Module]) -> None:
    """Keep of each block its input alone, and run it again in the backward pass, with the same random numbers."""
    for block in blocks:
        block.forward = partial(recomputed, block.forward, use_reentrant=False)


def compile_blocks(model: nn.Module, recomputed_ones: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """``torch.compile`` each block in place: the blocks of a width share their graphs, whatever the depth.

    Stochastic depth stays outside: its rate differs from block to block, and dynamo would take each for a
    constant and compile every block anew.

    Args:
        recomputed_ones: blocks that :func:`recompute_blocks` gets afterwards. dynamo compiles nothing that runs
            inside of a checkpoint's function unless it was compiled before.
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


class _Metrics:
    """``metrics.jsonl``: a line an event, cut back on resuming to what the checkpoint knows of."""

    def __init__(self, path: Path, known_bytes: int, writes: bool, trackers: Sequence[Tracker]):
        self.path, self.writes, self.trackers = path, writes, trackers
        if writes:
            path.touch()
            with path.open("r+") as file:
                file.truncate(known_bytes)

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.writes else 0

    def add(self, line: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            for track in self.trackers:
                track(scalars(line), line["step"])

    def last_epoch(self) -> dict[str, float]:
        if not self.writes:
            return {}
        lines = [json.loads(text) for text in self.path.read_text().splitlines()]
        last: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "epoch"), {})
        return {name: value for name, value in last.items() if name.startswith(("train_", "val_"))}


def _batch_line(settings: TrainingSettings, ranks: Ranks, task: Task) -> str:
    size = Share(0, ranks.world_size, settings.accumulation_steps).micro_batch_size(task.batch_size)
    text = (
        f"effective batch {task.batch_size} = {ranks.world_size} rank{'s' * (ranks.world_size > 1)} × "
        f"{settings.accumulation_steps} accumulated × {size}, lr {scaled_lr(settings):.3g}"
    )
    if settings.lr_base_size is not None:
        text += f" ({settings.lr:.3g} at {settings.lr_base_size}, {settings.lr_base_scale})"
    return text


def _progress(
    epoch: int, loss: float, position: Position, task: Task, settings: TrainingSettings, trained: Trained
) -> dict[str, Any]:
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
        "lr": max(group["lr"] for group in trained.optimizer.param_groups),
        "samples_per_second": position.step * task.batch_size / position.seconds,
        "speed": f"{position.step * task.batch_size * task.units_per_sample / position.seconds:.0f} {task.unit}/s",
        "seconds_left": (steps - position.step) * position.seconds / position.step,
        "memory_gib": _memory(trained.ranks.device),
    }


def _memory(device: torch.device) -> float:
    """The most that this process has held so far: of the accelerator's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _say_nothing(event: dict[str, Any]) -> None:
    """The report of ranks that are not the first."""


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
