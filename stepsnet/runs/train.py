"""One run: train a recipe in a folder, and write its results to ``summary.json``."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..device import autocast, pick_device
from ..engine.distributed import DistributedContext, init_distributed
from ..engine.metrics_log import MetricsLog
from ..engine.randomness import keep_random_states
from ..engine.task import BatchShard, Task, data_counts
from ..engine.train import TrainResult, train
from ..engine.update import Diverged, diverged
from ..errors import UserError
from ..files.writing import dump_json, without_nonfinite, write_atomically
from ..machine import cores
from ..models.blocks import widths_of
from ..models.grow.spec import with_sources
from ..output.console import Display
from ..output.redact import public_value
from ..run_folder.checkpoint import load_into, write_weights
from ..run_folder.folder import has_ended, has_weights, lock_folder, read_weights, updates_done
from ..run_folder.provenance import provenance, trained_before, write_process
from ..run_folder.records import LABEL, read_label, read_summary
from ..run_folder.resuming import Resume, can_go_on, is_past_its_start, open_run_folder, settle_recipe
from ..settings.config import Recipe
from ..tasks import build_task
from ..tasks.splits import split_of
from .inspection import inspect_run
from .prepare import Prepared, check_folder, prepare_run
from .report import report_or_tell

__all__ = ["train_run"]


def train_run(
    recipe: Recipe, folder: Path, display: Display, resume: Resume = False, label: str = "", lines_shown: bool = False
) -> dict[str, Any] | None:
    """Train a recipe in a folder to its end and return, on rank 0, the content of ``summary.json``.

    The model starts from the recipe's seed. What the recipe leaves open comes from its data or, when resuming, from the
    run's own config. With ``resume``, a run that was stopped goes on, and one that has ended is left as it is. Under
    torchrun every rank calls this function.

    Args:
        resume: False for a new run, True for one that goes on, "auto" for either; "extend" for one that goes on with
            the recipe's number of epochs, whatever it was before.
        label: what the model is called in reports; by default the label that the run was started with, or else the
            model's name.
        lines_shown: whether the lines before the training have been shown, by whoever starts several runs.

    Raises:
        UserError: bad input, or a loss, a gradient or a weight that is not finite.
        Interrupted: a signal arrived; a checkpoint was written first.
    """
    recipe = with_sources(recipe)
    with init_distributed(recipe.device) as context:
        context.check_same(dataclasses.asdict(recipe))
        # first without the folder's lock, so that a mismatch is reported before data and model are read
        checked, goes_on, has_checkpoints = context.on_main(
            lambda: (
                settle_recipe(folder, recipe, resume),
                bool(resume) and can_go_on(folder),
                is_past_its_start(folder),
            )
        )
        with _threads(checked, context.device) as threads:
            prepared = prepare_run(
                dataclasses.replace(checked, threads=threads),
                goes_on=goes_on,
                has_checkpoints=has_checkpoints,
            )
            context.check_same(dataclasses.asdict(prepared.recipe))
            context.check_same({"data": data_counts(prepared.task)})
            if lines_shown:
                prepared = dataclasses.replace(prepared, lines=[])
            return _train(prepared, folder, context, display, resume, label)


def _train(
    prepared: Prepared, folder: Path, context: DistributedContext, display: Display, resume: Resume, label: str
) -> dict[str, Any] | None:
    label = label or (read_label(folder) if resume else "")  # a new one keeps nothing of a start that failed here
    to_tell: list[str] = []

    def report(event: dict[str, Any]) -> None:
        while to_tell:  # with the first event, once the training loop has found no mistake
            note(to_tell.pop(0))
        display.show({"run": label or folder.name, **event})

    def note(text: str) -> None:
        display.note(label or folder.name, text)

    recipe, model, task = prepared.recipe, prepared.model, prepared.task
    lines = [*prepared.lines, *check_folder(folder, prepared)]
    with ExitStack() as held:
        claim = functools.partial(_claim_folder, held, prepared, folder, resume, label, context)
        recipe, ended, made_with = context.on_main(claim)
        page, title = folder / "report.html", f"{recipe.name}, seed {recipe.seed}"
        if ended:
            if context.is_main and not page.exists():  # killed before writing it, maybe while inspecting its model
                if has_weights(folder):
                    inspect_run(recipe, folder, task, read_weights(folder), context.device, note)
                report_or_tell([folder], page, title, note)
            return read_summary(folder) if context.is_main else None
        counts = context.on_main(functools.partial(_counts, model, task))  # a model that cannot be counted fails now
        to_tell += lines if context.is_main else []
        started = time.monotonic()
        try:
            result = train(model, task, recipe, folder, context, report)
        except Diverged as error:  # on every rank; torchrun stops all as soon as one ends
            context.on_main(functools.partial(_note_divergence, folder, error))
            if context.is_main:
                raise
            raise SystemExit(Diverged.status) from None
        if not context.is_main:
            return None
        seconds = round(result.earlier_seconds + time.monotonic() - started, 1)
        summary = _summarize(recipe, task, result, counts, label, seconds) | made_with
        summary = _write_results(recipe, folder, result, summary, note)
        inspect_run(recipe, folder, task, result.weights, context.device, note)
        report_or_tell([folder], page, title, note)
        return summary


def _claim_folder(
    held: ExitStack, prepared: Prepared, folder: Path, resume: Resume, label: str, context: DistributedContext
) -> tuple[Recipe, bool, dict[str, Any]]:
    """Lock the folder while ``held`` is open, and begin or continue the run in it.

    Returns:
        The recipe as the folder has it, whether the run has already ended and, if not, what it is made with.
    """
    held.enter_context(lock_folder(folder))
    recipe = open_run_folder(folder, prepared.recipe, resume)
    if label:  # so that whoever continues the run need not know its label
        write_atomically(folder / LABEL, label + "\n")
    if _has_all(folder, recipe):
        return recipe, True, {}
    _save_assets(prepared.task, prepared.model, folder)
    # recorded now, for the code that runs, since it may be committed meanwhile
    made_with = {"ranks": context.world_size, **provenance(context.device, prepared.recipe.imports)}
    write_process(folder, updates_done(folder), made_with)
    return recipe, False, made_with


def _write_results(
    recipe: Recipe, folder: Path, result: TrainResult, summary: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """Write the weights, score the test split and, last, write ``summary.json``, which marks a run as ended.

    An earlier summary is removed first, since it would describe other weights.
    """
    if before := trained_before(folder, summary):
        summary["trained_before"] = before
    (folder / "summary.json").unlink(missing_ok=True)
    summary["weights_sha256"] = write_weights(folder / "model.safetensors", result.weights)
    if getattr(recipe, "score_test", False):
        scores, facts = _score_test(recipe, folder, result.weights, note)
        summary["metrics"] |= scores
        summary["test"] = facts
    summary = _finite(summary)
    write_atomically(folder / "summary.json", dump_json(summary, indent=2) + "\n")
    return summary


def _note_divergence(folder: Path, error: Diverged) -> None:
    """Record for reports that a run has diverged; if it continues from a checkpoint, it loses the line."""
    with suppress(UserError):  # a full disk must not hide why the run has ended
        MetricsLog(folder / "metrics.jsonl", True).add({"kind": "diverged", "step": error.step, "text": str(error)})


@contextmanager
def _threads(recipe: Recipe, device: torch.device) -> Iterator[int | None]:
    """Compute with the recipe's number of threads, which affects rounding; yields the number to record."""
    before = torch.get_num_threads()
    threads = recipe.threads or min(before, cores())  # torch ignores a container's share of processor time
    torch.set_num_threads(threads)
    try:
        yield recipe.threads or (threads if device.type == "cpu" else None)
    finally:
        torch.set_num_threads(before)


def _has_all(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has ended, and its final weights exist or can no longer be written from a checkpoint."""
    lacks_weights = updates_done(folder) > 0 and not (folder / "model.safetensors").exists()
    return has_ended(folder, recipe) and not lacks_weights


def _save_assets(task: Task, model: nn.Module, folder: Path) -> None:
    try:
        task.save_assets(model, folder)
    except Exception as error:
        if not (isinstance(error, OSError) or "os error" in str(error)):  # tokenizers raises bare Exceptions
            raise
        raise UserError(f"--run: cannot write {folder}: {error}") from error


def _counts(model: nn.Module, task: Task) -> dict[str, Any]:
    """Return what ``summary.json`` says about the model itself, before the settings wrap anything around it."""
    with keep_random_states(torch.device("cpu")):
        return {**dataclasses.asdict(task.complexity(model)), "widths": widths_of(model)}


def _summarize(
    recipe: Recipe, task: Task, result: TrainResult, counts: dict[str, Any], label: str, seconds: float
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    return {
        "recipe": recipe.name,
        "label": label or recipe.model.name,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "data": public_value(recipe.data),
        "model": dataclasses.asdict(recipe.model),
        **({"import": list(recipe.imports)} if recipe.imports else {}),
        **counts,
        "metrics": {**result.metrics, f"best_val_{task.monitor}": result.best},
        "best_update": result.best_step,
        "expected": recipe.expected,
        **task.facts(),
        "seconds": seconds,
        "samples_per_second": result.samples_per_second,
    }


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Drop numbers that JSON cannot represent, such as the perplexity per word of a text of one long word.

    The loss is always finite: a run whose loss is not ends as diverged.
    """
    metrics = {name: value for name, value in summary["metrics"].items() if math.isfinite(value)}
    return {**without_nonfinite(summary), "metrics": metrics}


def _score_test(
    recipe: Recipe, folder: Path, weights: dict[str, torch.Tensor], note: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics on the test split, which has not been read before, and the task's facts about it."""
    model, task = build_task(recipe, f"{split_of(recipe.data)[0]}@test", folder)
    load_into(model, weights)
    device = pick_device(recipe.device)
    with autocast(recipe.amp_dtype, device):  # as the validation split is scored
        scores = task.evaluate(model.to(device).eval(), BatchShard(), device)
    if not math.isfinite(scores.get("loss", 0.0)):
        error = diverged("test_loss", scores["loss"], updates_done(folder), recipe)
        _note_divergence(folder, error)
        raise error
    for text in task.notices():  # a number must not hide what was left out
        note(f"test: {text}")
    return {f"test_{name}": value for name, value in scores.items()}, task.facts()
