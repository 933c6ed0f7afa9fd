"""A run and its folder: train a recipe, score a run.

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm.models
import torch
from filelock import FileLock, Timeout
from torch import nn

from .analysis.stream_signal import signal_line
from .engine.checkpoint import load_into, load_weights, newest, save_weights
from .engine.console import Display
from .engine.distributed import Ranks, join_ranks, pick_device
from .engine.settings import FREE
from .engine.task import Share
from .engine.train import fit
from .errors import UserError
from .files import write_atomically
from .models.build import build_model
from .provenance import provenance, without_folders
from .recipes.recipe import ClassificationRecipe, LanguageRecipe, ModelSpec, Recipe, override, read_recipe, to_yaml
from .report import write_report
from .stream import widths_of
from .tasks.setup import set_up

__all__ = ["evaluate_checkpoint", "evaluate_run", "open_folder", "recipe_of", "train_run", "trained_model"]


def open_folder(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Make the run folder and write ``config.yaml``, or check that it holds this very recipe.

    Raises:
        UserError: the folder is not empty, or holds another recipe.
    """
    config = folder / "config.yaml"
    if config.exists() and resume:
        theirs, ours = dataclasses.asdict(read_recipe(config)), dataclasses.asdict(recipe)
        for key, value in ours.items():
            if key in FREE or key == "data":  # the same data may have moved
                continue
            if json.dumps(theirs[key]) != json.dumps(value):
                raise UserError(f"--run: {folder} holds a run with {key} {theirs[key]!r}, got {value!r}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            hint = "--resume continues the run in it" if config.exists() else "nothing in it is overwritten"
            raise UserError(f"--run: {folder} is not empty, expected a new folder ({hint})")
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None
    write_atomically(config, to_yaml(recipe))


def train_run(
    recipe: Recipe, folder: Path, display: Display, resume: bool = False, label: str = ""
) -> dict[str, Any] | None:
    """Train a recipe in a folder, to the end; returns what ``summary.json`` holds, None on ranks but the first.

    The model starts from the recipe's seed. With ``resume``, a run that was stopped goes on, and one
    that has ended is left as it is. Under torchrun every rank calls it.

    Raises:
        UserError: bad input. Stopped: a signal, after a checkpoint.
    """
    with join_ranks(recipe.device) as ranks:
        ranks.agree(dataclasses.asdict(recipe))
        return _train(recipe, folder, ranks, display, resume, label)


def _train(
    recipe: Recipe, folder: Path, ranks: Ranks, display: Display, resume: bool, label: str
) -> dict[str, Any] | None:
    torch.manual_seed(recipe.seed)
    setup = set_up(recipe)
    if setup.start and newest(folder / "checkpoints")[0] is None:
        setup.start()
    if ranks.first:
        open_folder(folder, recipe, resume)
    ranks.barrier()
    with alone_in(folder, ranks.first):
        if (folder / "summary.json").exists():
            return json.loads((folder / "summary.json").read_text()) if ranks.first else None
        name = label or folder.name

        def report(event: dict[str, Any]) -> None:
            display.show({"run": name, **event})

        if ranks.first:
            setup.keep(folder)
        started = time.monotonic()
        look = setup.probe
        probe = (lambda model: look(model, ranks.device)) if look else None
        fitted = fit(setup.model, setup.task, recipe, folder, ranks, report=report, probe=probe, watch=signal_line)
        if not ranks.first:
            return None
        epochs = [line for line in _lines(folder / "metrics.jsonl") if line["kind"] == "epoch"]
        model = build_model(recipe.model)  # as it was before the settings put anything around it
        best = (min if setup.task.lower_is_better else max)(line[f"val_{setup.task.monitor}"] for line in epochs)
        scores = {**fitted.metrics, f"best_val_{setup.task.monitor}": best}
        if getattr(recipe, "score_test", False):
            scores |= _score_test(recipe, folder, fitted.weights)
        summary = {
            "recipe": recipe.name,
            "label": label or recipe.model.name,
            "seed": recipe.seed,
            "epochs": recipe.epochs,
            "lr": recipe.lr,
            "batch_size": recipe.batch_size,
            "data": without_folders(recipe.data),
            "model": dataclasses.asdict(recipe.model),
            **dataclasses.asdict(setup.complexity(model)),
            "widths": widths_of(model),
            "metrics": scores,
            "expected": recipe.expected,
            **setup.task.facts(),
            "seconds": round(time.monotonic() - started, 1),  # of this process: a resumed run counts from there
            "samples_per_second": epochs[-1]["samples_per_second"],
            "ranks": ranks.world_size,
            **provenance(),
        }
        save_weights(folder / "model.safetensors", fitted.weights)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_report([folder], folder / "report.html", f"{recipe.name}, seed {recipe.seed}")
        return summary


def _score_test(recipe: Recipe, folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics on the test split, which nothing has opened before."""
    setup = set_up(recipe, f"{recipe.data}@test", folder)
    load_into(setup.model, weights)
    device = pick_device(recipe.device)
    scores = setup.task.evaluate(setup.model.to(device).eval(), Share(), device)
    return {f"test_{name}": value for name, value in scores.items()}


@contextmanager
def alone_in(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold the folder's lock, which goes with the process however it ends.

    Raises:
        UserError: another process holds it.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        if writes:
            lock.acquire()
    except Timeout:
        raise UserError(f"--run: {folder} is in use by a run that is still alive") from None
    try:
        yield
    finally:
        lock.release()


def evaluate_run(
    folder: Path, data: str | None = None, stride: int | None = None, overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Metrics of a run's weights on its validation split, or on that of other data.

    Args:
        stride: of a language model, in place of its recipe's ``eval_stride``.
        overrides: changes to the recipe's fields that begin with ``eval_``, such as ``eval_flip=true``.

    Raises:
        UserError: no run is there, its weights cannot be read, or the data do not fit.
    """
    recipe = recipe_of(folder)
    if stride is not None:
        if not isinstance(recipe, LanguageRecipe):
            raise UserError(f"--stride: {folder} is a run of {recipe.task}, expected one of language")
        recipe = dataclasses.replace(recipe, eval_stride=stride)
    for assignment in overrides:
        if not assignment.startswith("eval_"):
            raise UserError(f"eval: got {assignment!r}, expected a key that begins with eval_")
    recipe = override(recipe, overrides)
    setup = set_up(recipe, data, folder)
    model, device = trained_model(folder, recipe, setup.model)
    return setup.task.evaluate(model, Share(), device)


def evaluate_checkpoint(path: Path, model_name: str, data: str, args: dict[str, Any] | None = None) -> dict[str, float]:
    """Metrics of a checkpoint file of any timm or StepsNet model on a data set's validation split.

    Args:
        path: safetensors or torch file with a state dict, as timm reads them.

    Raises:
        UserError: the file cannot be read or is of another model, or the classes differ.
    """
    recipe = ClassificationRecipe(name="eval", model=ModelSpec(model_name, args or {}), data=data, batch_size=1)
    model, device = build_model(recipe.model), pick_device("auto")
    try:
        weights = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # of torch, pickle, safetensors or the file system
        raise UserError(f"checkpoint: cannot read {path}: {' '.join(str(error).split())[:300]}") from None
    load_into(model, weights)
    return set_up(recipe).task.evaluate(model.to(device).eval(), Share(), device)


def recipe_of(folder: Path) -> Recipe:
    """Raises UserError where the folder is no run's."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")
    return read_recipe(folder / "config.yaml")


def trained_model(folder: Path, recipe: Recipe, model: nn.Module) -> tuple[nn.Module, torch.device]:
    """A run's model in evaluation mode, with its final weights or those of its newest whole checkpoint."""
    if (folder / "model.safetensors").exists():
        weights = load_weights(folder / "model.safetensors")
    else:
        checkpoint, _ = newest(folder / "checkpoints")
        if checkpoint is None:
            raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
        weights = checkpoint.weights()
    load_into(model, weights)
    device = pick_device(recipe.device)
    return model.to(device).eval(), device


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
