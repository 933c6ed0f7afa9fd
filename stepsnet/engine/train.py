"""The training loop: from a model, a task and settings to weights, resumable at every update."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..analysis.residual_stream import NoStream, stream_line, stream_line_of
from ..device import autocast
from ..errors import UserError, in_a_line, is_out_of_memory, nearest
from ..metrics import METRICS, higher_is_better
from ..output.redact import public
from ..settings.config import TrainingSettings
from .distributed import DistributedContext, broadcast_buffers, unwrap
from .interrupt import Interrupted, catch_signals
from .metrics_log import MetricsLog, trim_log
from .optim import Schedule, scaled_lr
from .prepare import prepare
from .randomness import seed_step
from .task import BatchShard, Task, data_counts
from .tracking import Tracker, open_trackers
from .train_state import find_checkpoint, full_state_dict
from .update import Diverged, Update, Updater, diverged

__all__ = ["TrainResult", "describe_batch", "train"]

Report = Callable[[dict[str, Any]], None]
_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass
class Position:
    """How far a run has come, as its checkpoints record it."""

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)  # of the epoch's means so far
    seconds: float = 0.0  # spent in updates
    all_seconds: float = 0.0  # including evaluations and whatever else came between the updates
    metrics_bytes: int = 0  # length of metrics.jsonl
    best: float = -math.inf  # of the task's monitored metric, or of its negative if lower is better
    best_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the last epoch


@dataclass(frozen=True)
class TrainResult:
    """The result of a run that has come to its end."""

    metrics: dict[str, float]  # of the last epoch
    weights: dict[str, torch.Tensor]  # those that were evaluated, on rank 0; empty elsewhere
    best: float  # value of the task's monitored metric
    best_step: int | None  # the update after which it was measured; this checkpoint is kept
    samples_per_second: float
    earlier_seconds: float  # of earlier processes, up to the checkpoint from which the next one went on


def train(
    model: nn.Module, task: Task, settings: TrainingSettings, folder: Path, context: DistributedContext, report: Report
) -> TrainResult:
    """Train ``model`` on ``task`` in ``folder``, from its latest checkpoint if it has one.

    Every rank calls it. Rank 0 writes ``metrics.jsonl`` and ``checkpoints/`` and reports.

    Args:
        report: called with what a display shows (output/console.py).

    Raises:
        Interrupted: on SIGINT, SIGTERM or SIGHUP, after a checkpoint of the update, or of the epoch's updates if an
            evaluation is under way; at once if the update fails.
        UserError: the loss, a gradient or a weight is not finite, a batch does not fit into memory, the folder cannot
            be written, or the task's monitored metric is not listed (metrics.py).
    """
    with catch_signals() as caught:
        try:
            trainer = Trainer(model, task, settings, folder, context, report, caught)
            with trainer.log:
                return trainer.run()
        except RuntimeError as error:
            if caught:  # a signal reaches a whole group of processes, including a compiler that the run waits for
                raise Interrupted(caught[0], folder=folder) from error
            raise


class Trainer:
    """One run: what is trained, how far it has come, and everything that happens around an update."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: TrainingSettings,
        folder: Path,
        context: DistributedContext,
        report: Report,
        caught: list[int],
    ):
        self.model, self.task, self.settings, self.context, self.caught = model, task, settings, context, caught
        self.report: Report = report if context.is_main else lambda event: None
        self.shard = BatchShard(context.rank, context.world_size, settings.accumulation_steps)
        self.shard.micro_batch_size(task.batch_size)
        if task.monitor not in METRICS:  # whether higher is better could only be guessed
            hint = nearest(task.monitor, METRICS)
            raise UserError(f"monitor of {type(task).__name__}: got {task.monitor!r}, expected a listed metric{hint}")
        if task.steps_per_epoch < 1:
            got = f"got {task.steps_per_epoch} with batches of {task.batch_size}"
            raise UserError(f"steps_per_epoch of {type(task).__name__}: {got}, expected at least 1")
        self.state, self.wrapped = prepare(model, settings, context)
        schedule = Schedule(self.state.optimizer, settings, task.steps_per_epoch)
        self.updater = Updater(
            self.wrapped, task, self.state.optimizer, schedule, settings, context, self.state.averages
        )
        self.evaluated_model = self.state.averages.module if self.state.averages else self.wrapped
        self.folder, self.checkpoints, self.position = folder, folder / "checkpoints", Position()
        self.earlier_seconds, self.began_at = 0.0, time.monotonic()
        self.note(describe_batch(settings, context, task))
        self.restore()
        trackers: list[Tracker] = []

        def open_log() -> None:
            lost = trim_log(folder / "metrics.jsonl", self.position.metrics_bytes, self.position.step)
            if lost:
                self.note(lost)
            trackers.extend(open_trackers(settings.tracker, folder, self.position.step, public(asdict(settings))))

        context.on_main(open_log)
        self.log = MetricsLog(folder / "metrics.jsonl", context.is_main, trackers, self.note)
        self.shown_at = 0.0
        self.noted: set[str] = set()

    def run(self) -> TrainResult:
        self.report_notices()  # what the data's check has found
        if self.position.step == 0:
            self.measure_stream(epoch=0)
        first_epoch, done = self.first_epoch()
        for epoch in range(first_epoch, self.settings.epochs):
            self.wrapped.train()  # and the model in it: a task asks what it is given, which may be DDP's wrapper
            with closing(self.batches_of_updates(epoch, done)) as updates:
                for batches in updates:
                    update = self.update(epoch, batches)
                    self.log_update(epoch, update)
                    self.report_notices()
                    self.checkpoint_within_epoch(update)
                    self.report_progress(epoch, update)
            done = 0
            line, progress = self.evaluate_or_save(epoch)
            self.report_notices()
            self.measure_stream(epoch + 1)
            self.position.sums = {}
            self.save()
            self.report({**progress, **line})
            self.stop_if_interrupted()
        sign = 1 if higher_is_better(self.task.monitor) else -1
        return TrainResult(
            self.position.metrics,
            full_state_dict(self.evaluated_model),
            sign * self.position.best,
            self.position.best_step,
            self.samples_per_second,
            self.earlier_seconds,
        )

    def restore(self) -> None:
        """Resume from the latest valid checkpoint, if there is one."""
        found, skipped = find_checkpoint(self.checkpoints, self.context)
        for reason in skipped:
            self.note(reason)
        if found:
            found.check_data(data_counts(self.task))
            self.state.restore(found)
            self.updater.scaler.load_state_dict(found.state["scaler"])
            self.task.load_state_dict(found.state.get("task", {}))  # an earlier version's checkpoint has none
            self.position = Position(**found.state["position"])
            self.earlier_seconds = self.position.all_seconds
            self.note(f"resumed after update {self.position.step}")

    def first_epoch(self) -> tuple[int, int]:
        """The epoch to go on with, and how many of its updates are done."""
        epoch, done = divmod(self.position.step, self.task.steps_per_epoch)
        if self.position.sums and not done:  # it was stopped between an epoch's last update and the evaluation
            return epoch - 1, self.task.steps_per_epoch
        return epoch, done

    def batches_of_updates(self, epoch: int, done: int) -> Generator[Iterable[Any]]:
        """The micro-batches of each update; the time of an update includes loading them.

        Each is moved to the device when the update asks for it, so that the device holds at most two.
        """
        # closed on every way out, not when the generator is garbage-collected: it may hold processes that load
        with closing(self.task.batches(epoch, done, self.shard, self.context.device)) as micro_batches:
            for _ in range(done, self.task.steps_per_epoch):
                self.started_at = time.perf_counter()
                yield islice(micro_batches, self.settings.accumulation_steps)

    def update(self, epoch: int, batches: Iterable[Any]) -> Update:
        with self.observing_stream() as seen:
            update = self.updater(self.position.step, batches, self.caught)
        self.position.step += 1
        if "refused" in seen:
            self.note_once(seen["refused"])
        elif seen:
            self.log.add({"epoch": epoch + 1, "step": self.position.step, **seen})
        for name, mean in update.means.items():
            self.position.sums[name] = self.position.sums.get(name, 0.0) + mean
        self.position.seconds += time.perf_counter() - self.started_at
        return update

    def log_update(self, epoch: int, update: Update) -> None:
        if self.position.step % self.settings.log_interval == 0:
            line = {"kind": "step", "step": self.position.step, "epoch": epoch + 1, "lr": self.lr}
            self.log.add({**line, **update.means, "grad_norm": update.grad_norm})

    def checkpoint_within_epoch(self, update: Update) -> None:
        """Save at an interval, except at an epoch's end, which has its own checkpoint; save and stop after a signal.

        After a signal, an epoch's end is no exception: torchrun waits for seconds, and an evaluation may take minutes.
        """
        interval = self.settings.checkpoint_interval
        if update.interrupted:
            self.save()
            self.stop()
        if interval and self.position.step % interval == 0 and self.position.step % self.task.steps_per_epoch:
            self.save()

    def evaluate_or_save(self, epoch: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call :meth:`evaluate`, and keep the epoch's updates in a checkpoint if it fails.

        It fails if it does not fit into memory, its data fail or a signal ends it; resuming then begins with the
        evaluation. Several ranks write the checkpoint beforehand: if one fails, the others wait in the evaluation, and
        torchrun kills all of them some seconds after a signal.

        Raises:
            UserError: the evaluation does not fit into memory, or fails.
            Interrupted: a signal came, and the run's only process was about to call the model.
        """
        is_alone = self.context.world_size == 1
        if not is_alone:
            self.save()

        def obey_signals(*_: object) -> None:  # several ranks would have to agree before each pass
            if is_alone and self.caught:
                self.stop()

        # not a bound method: a copy of the model would copy self too
        obeying = self.evaluated_model.register_forward_pre_hook(obey_signals)
        try:
            return self.evaluate(epoch)
        except Diverged:
            raise
        except (UserError, Interrupted):
            if is_alone:
                self.save()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        finally:
            obeying.remove()
        if is_alone:
            self.save()
        graphs = ", or cuda_graph=false" * self.settings.cuda_graph
        raise UserError(
            f"memory: the evaluation after epoch {epoch + 1} does not fit ({reason}), expected more memory, or lower "
            f"eval_batch_size, img_size, crop_size or seq_len{graphs}; the epoch's updates are saved, and resuming "
            "begins with the evaluation"
        )

    def evaluate(self, epoch: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Score the validation split, and return the epoch's line of metrics and its progress."""
        means = {f"train_{name}": total / self.task.steps_per_epoch for name, total in self.position.sums.items()}
        self.report({"kind": "phase", "text": f"epoch {epoch + 1}/{self.settings.epochs}: evaluating"})
        self.evaluated_model.eval()
        broadcast_buffers(self.context, self.evaluated_model)
        with autocast(self.settings.amp_dtype, self.context.device):
            scores = self.task.evaluate(self.evaluated_model, self.shard, self.context.device)
        scores = {name: float(value) for name, value in scores.items()}  # checkpoints hold no numpy numbers
        if not math.isfinite(scores.get("loss", 0.0)):
            raise diverged("val_loss", scores["loss"], self.position.step, self.settings)
        if self.task.monitor not in scores:
            of, got = type(self.task).__name__, ", ".join(scores) or "nothing"
            raise UserError(f"evaluate of {of}: got {got}, expected its monitor {self.task.monitor} among them")
        monitored = scores[self.task.monitor] * (1 if higher_is_better(self.task.monitor) else -1)
        if monitored > self.position.best:
            self.position.best, self.position.best_step = monitored, self.position.step
        progress = self.progress(epoch, means.get("train_loss", math.nan))
        kept = {name: progress[name] for name in ("lr", "samples_per_second", "memory_gib")}
        scored = {name if name.startswith("train_") else f"val_{name}": value for name, value in scores.items()}
        self.position.metrics = {**means, **scored}
        line = {"kind": "epoch", "epoch": epoch + 1, "step": self.position.step, **kept, **self.position.metrics}
        self.context.on_main(lambda: self.log.add(line))
        self.report({**progress, **scores})
        return line, progress

    def save(self) -> None:
        """Write a checkpoint. Raises UserError if a weight is not finite: the last good checkpoint is kept."""
        self.updater.check_weights(self.position.step)
        self.position.all_seconds = self.earlier_seconds + time.monotonic() - self.began_at
        self.position.metrics_bytes = self.context.broadcast_object(self.log.size_bytes)
        broadcast_buffers(self.context, self.model, self.evaluated_model)
        state = {
            "position": vars(self.position),
            "scaler": self.updater.scaler.state_dict(),
            "data": data_counts(self.task),
            "task": self.state_of_task(),
        }
        keep, best = self.settings.keep_checkpoints, self.position.best_step
        self.state.save(self.checkpoints, self.position.step, state, keep, best)

    def state_of_task(self) -> Any:
        """The task's state as JSON reads it back: with numpy numbers, a checkpoint could be written but not read."""
        try:
            return json.loads(json.dumps(self.task.state_dict()))
        except (TypeError, ValueError) as error:
            of = type(self.task).__name__
            raise UserError(f"state_dict of {of}: {error}, expected numbers, text, lists and mappings") from None

    def stop_if_interrupted(self) -> None:
        if any(self.context.mean([torch.tensor(float(bool(self.caught)))])):  # on any rank
            self.stop()

    def stop(self) -> None:
        number = self.context.broadcast_object(self.caught[0] if self.caught else 15)
        raise Interrupted(number, self.position.step, self.folder)

    def measure_stream(self, epoch: int) -> None:
        """Measure the stream at an epoch's end on the task's example batch. Every rank takes part, as FSDP requires."""
        every = self.settings.stream_epochs
        if not (every and epoch % every == 0):
            return
        seed_step(self.settings.seed, self.position.step)  # some losses draw random numbers
        model = unwrap(self.evaluated_model).eval()
        batch = self.task.example_batch(self.context.device)
        try:
            line = stream_line_of(model, lambda model: self.task.loss(model, batch)[0])
        except NoStream as error:
            return self.note_once(str(error))
        except RuntimeError as error:  # it must not cost the epoch that has just ended
            if not is_out_of_memory(error) or self.context.world_size > 1:  # other ranks may be waiting in it
                raise
            return self.note_once(f"stream: not measured, since it does not fit into memory ({in_a_line(error, 200)})")
        self.context.on_main(lambda: self.log.add({"epoch": epoch, "step": self.position.step, **line}))

    def observing_stream(self) -> AbstractContextManager[dict[str, Any]]:
        """Measure the stream in an update of training, on rank 0's own batch."""
        step, interval = self.position.step + 1, self.settings.stream_interval
        if not (self.context.is_main and interval and (step == 1 or step % interval == 0)):
            return nullcontext({})
        return stream_line(self.model, self.updater.scaler.get_scale() / self.settings.accumulation_steps)

    @property
    def samples_per_second(self) -> float:
        return self.position.step * self.task.batch_size / self.position.seconds

    @property
    def lr(self) -> float:
        return max(group["lr"] for group in self.state.optimizer.param_groups)

    def note(self, text: str) -> None:
        self.report({"kind": "note", "text": text})

    def note_once(self, text: str) -> None:
        if text not in self.noted:
            self.noted.add(text)
            self.note(text)

    def report_notices(self) -> None:
        for text in self.task.notices():
            self.note(text)

    def report_progress(self, epoch: int, update: Update) -> None:
        if time.monotonic() - self.shown_at > _SECONDS_BETWEEN_REPORTS:
            self.shown_at = time.monotonic()
            self.report(self.progress(epoch, update.means["loss"]))

    def progress(self, epoch: int, loss: float) -> dict[str, Any]:
        task, position = self.task, self.position
        steps = self.settings.epochs * task.steps_per_epoch
        in_epoch = position.step - epoch * task.steps_per_epoch
        samples_per_second = self.samples_per_second
        return {
            "kind": "progress",
            "epoch": epoch + 1,
            "epochs": self.settings.epochs,
            "step": position.step,
            "steps": steps,
            "loss": loss,
            **{name: total / max(in_epoch, 1) for name, total in position.sums.items() if name != "loss"},
            "lr": self.lr,
            "samples_per_second": samples_per_second,
            "speed": f"{samples_per_second * task.units_per_sample:.0f} {task.unit}/s",
            "seconds_left": (steps - position.step) * position.seconds / position.step,
            "memory_gib": _peak_memory_gib(self.context.device),
        }


def describe_batch(settings: TrainingSettings, context: DistributedContext, task: Task) -> str:
    """How a batch is divided, and the learning rate: ``effective batch 32 = 1 rank × 1 accumulated × 32, lr 0.004``."""
    size = BatchShard(0, context.world_size, settings.accumulation_steps).micro_batch_size(task.batch_size)
    text = (
        f"effective batch {task.batch_size} = {context.world_size} rank{'s' * (context.world_size > 1)} × "
        f"{settings.accumulation_steps} accumulated × {size}, lr {scaled_lr(settings):.3g}"
    )
    if settings.lr_base_size is not None:
        text += f" ({settings.lr:.3g} at {settings.lr_base_size}, {settings.lr_base_scale})"
    return text


def _peak_memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: of the accelerator's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
