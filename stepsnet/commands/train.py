"""`stepsnet train`: train a recipe in a folder of its own, or continue there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_run_options, recipe_and_folder

if TYPE_CHECKING:
    import torch

    from ..config import Recipe
    from ..console import Display
    from ..engine.distributed import DistributedContext
    from ..engine.train import TrainResult

__all__ = ["train_run"]

HELP = "train a recipe, or continue a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    add_run_options(parser)


def run(options: argparse.Namespace) -> None:
    from ..console import choose_display
    from ..metrics import SPLITS, headline

    recipe, folder = recipe_and_folder(options)
    with choose_display() as display:
        summary = train_run(recipe, folder, display, options.resume)
    if summary:
        parts = {SPLITS[split]: headline(summary["metrics"], split) for split in ("val", "train")}
        said = ", ".join(f"{split} {text}" for split, text in parts.items() if text)
        print(f"report: {folder / 'report.html'} — after {summary['epochs']} epochs: {said}")


def train_run(
    recipe: Recipe, folder: Path, display: Display, resume: bool = False, label: str = ""
) -> dict[str, Any] | None:
    """Train a recipe in a folder, to the end; returns what ``summary.json`` holds, on rank 0.

    The model starts from the recipe's seed. With ``resume``, a run that was stopped goes on, and one
    that has ended is left as it is. Under torchrun every rank calls it.

    Args:
        label: what the model is called in reports; by default its name.

    Raises:
        UserError: bad input. Interrupted: a signal, after a checkpoint.
    """
    from ..engine.distributed import init_distributed

    with init_distributed(recipe.device) as context:
        context.check_same(dataclasses.asdict(recipe))
        return _train(recipe, folder, context, display, resume, label)


def _train(
    recipe: Recipe, folder: Path, context: DistributedContext, display: Display, resume: bool, label: str
) -> dict[str, Any] | None:
    import torch

    from ..checkpoint import latest, save_weights
    from ..engine.train import train
    from ..files import write_atomically
    from ..report import write_report
    from ..run_folder import lock_folder, open_run_folder, read_summary
    from ..tasks import build_task

    torch.manual_seed(recipe.seed)
    model, task = build_task(recipe)
    if latest(folder / "checkpoints")[0] is None:
        task.load_pretrained(model)
    if context.is_main:
        open_run_folder(folder, recipe, resume)
    context.barrier()
    with lock_folder(folder, context.is_main):
        if summary := read_summary(folder):
            return summary if context.is_main else None
        if context.is_main:
            task.save_assets(model, folder)
        started = time.monotonic()
        name = label or folder.name
        result = train(model, task, recipe, folder, context, lambda event: display.show({"run": name, **event}))
        if not context.is_main:
            return None
        seconds = round(time.monotonic() - started, 1)  # of this process: a resumed run counts from there
        summary = _summarize(recipe, folder, task, result, label, seconds, context.world_size)
        if getattr(recipe, "score_test", False):
            summary["metrics"] |= _score_test(recipe, folder, result.weights)
        save_weights(folder / "model.safetensors", result.weights)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_report([folder], folder / "report.html", f"{recipe.name}, seed {recipe.seed}")
        return summary


def _summarize(
    recipe: Recipe, folder: Path, task: Any, result: TrainResult, label: str, seconds: float, ranks: int
) -> dict[str, Any]:
    """What a run that has ended says of itself in ``summary.json``."""
    from ..metrics import higher_is_better
    from ..models.build import build_model
    from ..provenance import provenance, without_folders
    from ..run_folder import read_metrics
    from ..stream import widths_of

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
    """Metrics on the test split, which nothing has opened before."""
    from ..checkpoint import load_into
    from ..engine.distributed import pick_device
    from ..engine.task import BatchShard
    from ..tasks import build_task

    model, task = build_task(recipe, f"{recipe.data}@test", folder)
    load_into(model, weights)
    device = pick_device(recipe.device)
    scores = task.evaluate(model.to(device).eval(), BatchShard(), device)
    return {f"test_{name}": value for name, value in scores.items()}
