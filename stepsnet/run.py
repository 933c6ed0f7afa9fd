"""A run and its folder: train a recipe, score a run, predict with it.

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import timm
import timm.data
import timm.models
import torch
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor, nn

from .analysis.complexity import count_complexity
from .analysis.shortcut_ratio import shortcut_ratios
from .engine.checkpoint import check_fit, load_weights, newest, save_weights
from .engine.console import Display
from .engine.distributed import Ranks, join_ranks, pick_device
from .engine.settings import FREE
from .engine.task import Share
from .engine.train import fit
from .errors import UserError, nearest
from .files import write_atomically
from .provenance import provenance
from .recipes.recipe import ModelSpec, Recipe, read_recipe, to_yaml
from .report import write_report
from .stream import step_sequences
from .tasks.classification import Classification
from .tasks.image_data import UNREADABLE, ImageData, InputSpec, load_images

__all__ = ["build_model", "evaluate_checkpoint", "evaluate_run", "open_folder", "predict", "train_run"]

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
    model = build_model(recipe.model)
    images = load_images(recipe.data, input_spec(recipe, model), recipe.augment, recipe.seed, recipe.train_samples)
    task = _task(recipe, images)
    check_classes(model, images)
    if ranks.first:
        open_folder(folder, recipe, resume)
    ranks.barrier()
    with alone_in(folder, ranks.first):
        if (folder / "summary.json").exists():
            return json.loads((folder / "summary.json").read_text()) if ranks.first else None
        name = label or folder.name

        def report(event: dict[str, Any]) -> None:
            display.show({"run": name, **event})

        started = time.monotonic()
        probe = partial(shortcut_ratios, images=_probed(images).to(ranks.device)) if step_sequences(model) else None
        fitted = fit(model, task, recipe, folder, ranks, report=report, probe=probe)
        if not ranks.first:
            return None
        epochs = [line for line in _lines(folder / "metrics.jsonl") if line["kind"] == "epoch"]
        model = build_model(recipe.model)  # as it was before the settings put anything around it
        counts = count_complexity(model, tuple(_probed(images).shape[1:]))
        summary = {
            "recipe": recipe.name,
            "label": label or recipe.model.name,
            "seed": recipe.seed,
            "epochs": recipe.epochs,
            "model": dataclasses.asdict(recipe.model),
            **dataclasses.asdict(counts),
            "widths": [block.width for container in step_sequences(model) for block in container],
            "metrics": {**fitted.metrics, "best_val_top1": max(line["val_top1"] for line in epochs)},
            "expected": recipe.expected,
            "undecodable": len(task.undecodable),
            "seconds": round(time.monotonic() - started, 1),  # of this process: a resumed run counts from there
            "samples_per_second": epochs[-1]["samples_per_second"],
            "ranks": ranks.world_size,
            **provenance(),
        }
        save_weights(folder / "model.safetensors", fitted.weights)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_report([folder], folder / "report.html", f"{recipe.name}, seed {recipe.seed}")
        return summary


def input_spec(recipe: Recipe, model: nn.Module) -> InputSpec:
    """How pictures become this model's inputs: timm's data config, at the size that the model is built for."""
    config = timm.data.resolve_model_data_config(model)
    chans, height, width = config["input_size"]
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = (recipe.img_size,) * 2 if recipe.img_size else built_for or (height, width)
    chans = recipe.model.args.get("in_chans", chans)
    mean, std = config["mean"], config["std"]
    if chans == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    crop_pct = recipe.crop_pct or config["crop_pct"]
    return InputSpec((chans, height, width), tuple(mean), tuple(std), config["interpolation"], crop_pct)


def check_classes(model: nn.Module, images: ImageData) -> None:
    """Raises UserError where the model's head has another number of classes than the data."""
    got, expected = getattr(model, "num_classes", None), len(images.classes)
    if got is not None and got != expected:
        raise UserError(f"model.args.num_classes: got {got}, expected the data's {expected}")


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


def evaluate_run(folder: Path, data: str | None = None) -> dict[str, float]:
    """Metrics of a run's weights on its validation split, or on that of other data of the same classes.

    Raises:
        UserError: no run is there, its weights cannot be read, or the classes differ.
    """
    recipe, model, images, device = _load_run(folder, data)
    return _task(recipe, images).evaluate(model, Share(), device)


def evaluate_checkpoint(path: Path, model_name: str, data: str, args: dict[str, Any] | None = None) -> dict[str, float]:
    """Metrics of a checkpoint file of any timm or StepsNet model on a data set's validation split.

    Args:
        path: safetensors or torch file with a state dict, as timm reads them.

    Raises:
        UserError: the file cannot be read or is of another model, or the classes differ.
    """
    spec = ModelSpec(model_name, args or {})
    recipe, model, device = Recipe(name="eval", model=spec, data=data), build_model(spec), pick_device("auto")
    try:
        weights = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # of torch, pickle, safetensors or the file system
        raise UserError(f"checkpoint: cannot read {path}: {' '.join(str(error).split())[:300]}") from None
    check_fit(model, weights)
    model.load_state_dict(weights)
    images = load_images(data, input_spec(recipe, model))
    check_classes(model, images)
    task = Classification(images, 1)
    return task.evaluate(model.to(device).eval(), Share(), device)


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
        except UNREADABLE as error:
            reason = "no such file" if not file.exists() else str(error).split(":")[0]
            raise UserError(f"predict: cannot read {file} as a picture: {reason}") from None
    probabilities = torch.cat([model(x[None].to(device)).softmax(-1) for x in inputs])  # (files, classes)
    ranked = probabilities.topk(min(top, len(images.classes)))
    return [
        (file, [(images.classes[i], p) for p, i in zip(values.tolist(), indices.tolist())])
        for file, values, indices in zip(files, ranked.values, ranked.indices)
    ]


def _task(recipe: Recipe, images: ImageData) -> Classification:
    return Classification(
        images,
        recipe.batch_size,
        seed=recipe.seed,
        label_smoothing=recipe.label_smoothing,
        augment=recipe.augment,
        workers=recipe.workers,
        max_undecodable=recipe.max_undecodable,
    )


def _probed(images: ImageData) -> Tensor:
    """The inputs that a probe looks at: the first of the validation split, which no augmentation touches."""
    return torch.stack([images.val[0, index, 0][0] for index in range(min(_IMAGES_PROBED, len(images.val)))])


def _load_run(folder: Path, data: str | None = None) -> tuple[Recipe, nn.Module, ImageData, torch.device]:
    """A run's model in evaluation mode, with its final weights or those of its newest whole checkpoint."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")
    recipe = read_recipe(folder / "config.yaml")
    model, device = build_model(recipe.model), pick_device(recipe.device)
    if (folder / "model.safetensors").exists():
        weights = load_weights(folder / "model.safetensors")
    else:
        checkpoint, _ = newest(folder / "checkpoints")
        if checkpoint is None:
            raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
        weights = checkpoint.weights()
    check_fit(model, weights)
    model.load_state_dict(weights)
    images = load_images(data or recipe.data, input_spec(recipe, model), None, recipe.seed)
    check_classes(model, images)
    return recipe, model.to(device).eval(), images, device


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
