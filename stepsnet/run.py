"""A run and its folder: train a recipe, score a run, predict with it.

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image, UnidentifiedImageError
from torch import nn

from .analysis.complexity import count_complexity
from .analysis.shortcut_ratio import shortcut_ratios
from .engine.checkpoint import load_newest, load_weights, save_weights
from .engine.console import Display
from .engine.train import fit, load_strictly, pick_device
from .errors import UserError, nearest
from .files import write_atomically
from .provenance import provenance
from .recipes.recipe import ModelSpec, Recipe, read_recipe, to_yaml
from .report import write_report
from .stream import step_sequences
from .tasks.classification import Classification, ImageArrays, load_images

__all__ = ["build_model", "evaluate_run", "open_folder", "predict", "train_run"]

_IMAGES_PROBED = 64


def build_model(spec: ModelSpec) -> nn.Module:
    """Raises UserError for a name that timm does not know, or arguments that the model does not take."""
    if not timm.is_model(spec.name):
        raise UserError(
            f"model: got {spec.name!r}, expected a timm or StepsNet model{nearest(spec.name, timm.list_models())}"
        )
    try:
        return timm.create_model(spec.name, **spec.args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {spec.name}: {' '.join(str(error).split())}") from error


def open_folder(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Make the run folder and write ``config.yaml``, or check that it holds this very recipe.

    Raises:
        UserError: the folder is not empty, or holds another recipe.
    """
    config = folder / "config.yaml"
    if config.exists() and resume:
        theirs, ours = dataclasses.asdict(read_recipe(config)), dataclasses.asdict(recipe)
        for key, value in ours.items():
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


def train_run(recipe: Recipe, folder: Path, display: Display, resume: bool = False, label: str = "") -> dict[str, Any]:
    """Train a recipe in a folder, to the end; returns what ``summary.json`` holds.

    The model starts from the recipe's seed. With ``resume``, a run that was stopped goes on, and one
    that has ended is left as it is.

    Raises:
        UserError: bad input. Stopped: a signal, after a checkpoint.
    """
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model)
    images = load_images(recipe.data)
    task = Classification(images, recipe.batch_size, recipe.label_smoothing, recipe.seed)
    device = pick_device(recipe.device)
    open_folder(folder, recipe, resume)
    if (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    name = label or folder.name

    def report(event: dict[str, Any]) -> None:
        display.show({"run": name, **event})

    started = time.monotonic()
    probe = partial(shortcut_ratios, images=images.train_images[:_IMAGES_PROBED].to(device))
    metrics = fit(model, task, recipe, folder, report=report, probe=probe)
    epochs = [line for line in _lines(folder / "metrics.jsonl") if line["kind"] == "epoch"]
    counts = count_complexity(model, tuple(images.val_images.shape[1:]))
    summary = {
        "recipe": recipe.name,
        "label": label or recipe.model.name,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "model": dataclasses.asdict(recipe.model),
        **dataclasses.asdict(counts),
        "widths": [block.width for container in step_sequences(model) for block in container],
        "metrics": {**metrics, "best_val_top1": max(line["val_top1"] for line in epochs)},
        "seconds": round(time.monotonic() - started, 1),  # of this process: a resumed run counts from there
        "samples_per_second": epochs[-1]["samples_per_second"],
        **provenance(),
    }
    save_weights(folder / "model.safetensors", model.state_dict())
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_report([folder], folder / "report.html", f"{recipe.name}, seed {recipe.seed}")
    return summary


def evaluate_run(folder: Path) -> dict[str, float]:
    """Metrics of a run's weights on its validation split.

    Raises:
        UserError: no run is there, or its weights cannot be read.
    """
    recipe, model, images, device = _load_run(folder)
    task = Classification(images, recipe.batch_size, recipe.label_smoothing, recipe.seed)
    return task.evaluate(model, device)


@torch.no_grad()
def predict(folder: Path, files: Sequence[Path], top: int = 5) -> list[tuple[Path, list[tuple[str, float]]]]:
    """The likeliest classes of each picture, with probabilities.

    Raises:
        UserError: a file that is missing or no picture; it is named, and nothing is predicted.
    """
    _, model, images, device = _load_run(folder)
    inputs = []
    for file in files:
        try:
            with Image.open(file) as picture:
                inputs.append(images.read(picture))
        except (OSError, UnidentifiedImageError) as error:
            reason = "no such file" if not file.exists() else str(error).split(":")[0]
            raise UserError(f"predict: cannot read {file} as a picture: {reason}") from None
    probabilities = torch.cat([model(x[None].to(device)).softmax(-1) for x in inputs])  # (files, classes)
    ranked = probabilities.topk(min(top, len(images.classes)))
    return [
        (file, [(images.classes[i], p) for p, i in zip(values.tolist(), indices.tolist())])
        for file, values, indices in zip(files, ranked.values, ranked.indices)
    ]


def _load_run(folder: Path) -> tuple[Recipe, nn.Module, ImageArrays, torch.device]:
    """A run's model in evaluation mode, with its final weights or those of its newest whole checkpoint."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")
    recipe = read_recipe(folder / "config.yaml")
    model, device = build_model(recipe.model), pick_device(recipe.device)
    if (folder / "model.safetensors").exists():
        weights = load_weights(folder / "model.safetensors")
    else:
        newest = load_newest(folder / "checkpoints", device)
        if newest is None:
            raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
        weights = newest[0]
    load_strictly(model, weights)
    return recipe, model.to(device).eval(), load_images(recipe.data), device


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
