"""One run: train a recipe in a folder, and write its results to ``summary.json``."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import checkpoint_folders, load_into, save_weights
from ..config import Recipe
from ..console import Display
from ..engine.distributed import DistributedContext, init_distributed, pick_device
from ..engine.task import BatchShard, Task
from ..engine.train import TrainResult, train
from ..files import write_atomically
from ..metrics import higher_is_better
from ..models.blocks import widths_of
from ..models.build import build_model
from ..provenance import provenance, without_folders
from ..report import write_report
from ..run_folder import lock_folder, open_run_folder, read_metrics, read_run_recipe, read_summary
from ..tasks import build_task
from .inspection import inspect_run
from .prepare import prepare_run

__all__ = ["train_run"]


def train_run(
    recipe: Recipe, folder: Path, display: Display, resume: bool = False, label: str = "", told: bool = False
) -> dict[str, Any] | None:
    """Train a recipe in a folder, to the end; returns what ``summary.json`` holds, on rank 0.

    The model starts from the recipe's seed. What the recipe leaves open comes from its data, or on resuming from the
    run's own config. With ``resume``, a run that was stopped goes on, and one that has ended is left as it is. Under
    torchrun every rank calls it.

    Args:
        label: what the model is called in reports; by default its name.
        told: what is to be said before the training has been said, by who starts several runs.

    Raises:
        UserError: bad input. Interrupted: a signal, after a checkpoint.
    """
    with init_distributed(recipe.device) as context:
        context.check_same(dataclasses.asdict(recipe))
        return _train(recipe, folder, context, display, resume, label, told)


def _train(
    recipe: Recipe, folder: Path, context: DistributedContext, display: Display, resume: bool, label: str, told: bool
) -> dict[str, Any] | None:
    def show(event: dict[str, Any]) -> None:
        display.show({"run": label or folder.name, **event})

    has_begun = context.broadcast_object(resume and (folder / "config.yaml").exists())
    begun = read_run_recipe(folder) if has_begun else None
    prepared = prepare_run(recipe, begun, bool(checkpoint_folders(folder / "checkpoints")))
    recipe, model, task = prepared.recipe, prepared.model, prepared.task
    context.check_same(dataclasses.asdict(recipe))
    if context.is_main:
        open_run_folder(folder, recipe, resume)
        for text in () if told else prepared.lines:
            show({"kind": "note", "text": text})
    context.barrier()
    with lock_folder(folder, context.is_main):
        if summary := read_summary(folder):
            if context.is_main and not (folder / "report.html").exists():  # it was stopped between the two
                _write_page(recipe, folder)
            return summary if context.is_main else None
        if context.is_main:
            task.save_assets(model, folder)
        started = time.monotonic()
        result = train(model, task, recipe, folder, context, show)
        if not context.is_main:
            return None
        seconds = round(time.monotonic() - started, 1)  # of this process: a resumed run counts from there
        summary = _summarize(recipe, folder, task, result, label, seconds, context.world_size)
        if getattr(recipe, "score_test", False):
            summary["metrics"] |= _score_test(recipe, folder, result.weights)
        save_weights(folder / "model.safetensors", result.weights)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        inspect_run(
            recipe, folder, task, result.weights, context.device, lambda text: show({"kind": "note", "text": text})
        )
        _write_page(recipe, folder)
        return summary


def _write_page(recipe: Recipe, folder: Path) -> None:
    write_report([folder], folder / "report.html", f"{recipe.name}, seed {recipe.seed}")


def _summarize(
    recipe: Recipe, folder: Path, task: Task, result: TrainResult, label: str, seconds: float, ranks: int
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    epochs = [line for line in read_metrics(folder) if line["kind"] == "epoch"]
    monitored = [line[f"val_{task.monitor}"] for line in epochs]
    model = build_model(recipe.model)  # as it was before the settings put anything around it
    return {
        "recipe": recipe.name,
        "label": label or recipe.model.name,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "data": without_folders(recipe.data),
        "model": dataclasses.asdict(recipe.model),
        **({"import": list(recipe.imports)} if recipe.imports else {}),
        **dataclasses.asdict(task.complexity(model)),
        "widths": widths_of(model),
        "metrics": {
            **result.metrics,
            f"best_val_{task.monitor}": max(monitored) if higher_is_better(task.monitor) else min(monitored),
        },
        "expected": recipe.expected,
        **task.facts(),
        "seconds": seconds,
        "samples_per_second": epochs[-1]["samples_per_second"],
        "ranks": ranks,
        **provenance(),
    }


def _score_test(recipe: Recipe, folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics on the test split, which has not been read before."""
    model, task = build_task(recipe, f"{recipe.data}@test", folder)
    load_into(model, weights)
    device = pick_device(recipe.device)
    scores = task.evaluate(model.to(device).eval(), BatchShard(), device)
    return {f"test_{name}": value for name, value in scores.items()}
