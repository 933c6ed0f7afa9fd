"""Analyses of runs, on their validation split: Fig. 2 and what stands behind it, and the paper's Tables 6 and 7."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .analysis.block_signal import summarised
from .analysis.interventions import drop_each, drop_steps, mask_paths
from .analysis.stream_signal import stream_signal
from .engine.checkpoint import load_into, whole_ones
from .engine.distributed import pick_device
from .engine.task import Share
from .errors import UserError
from .recipes.recipe import ClassificationRecipe
from .report.signal import SignalOf, draw_signal
from .run import recipe_of, trained_model
from .tasks.setup import set_up

__all__ = ["analyze_drop", "analyze_mask", "analyze_shortcut", "render_rows"]


Evaluate = Callable[[nn.Module], dict[str, float]]
Analysis = Callable[[nn.Module, Evaluate], list[dict[str, Any]]]


def analyze_shortcut(folders: Sequence[Path], out: Path, data: str | None = None) -> list[dict[str, Any]]:
    """Fig. 2 of any runs: the signal in the residual stream at every checkpoint that they keep.

    Writes ``signal.png``, ``signal.svg`` and ``signal.csv`` in ``out``.

    Returns:
        A row for each checkpoint: the mean, least and last γ, the correlation of the output with the input, and
        the gradient at the first block over that at the last.

    Raises:
        UserError: a folder is no run, or has no checkpoint.
    """
    signals, rows = [], []
    for folder in folders:
        recipe = recipe_of(folder)
        if isinstance(recipe, ClassificationRecipe):
            recipe = dataclasses.replace(recipe, augment=None)
        setup, device = set_up(recipe, data, folder), pick_device(recipe.device)
        model, batch = setup.model.to(device).eval(), setup.sample(device)
        checkpoints = whole_ones(folder / "checkpoints")
        if not checkpoints:
            raise UserError(f"analyze: {folder} has no whole checkpoint")
        for checkpoint in checkpoints:
            load_into(model, checkpoint.weights())
            found = stream_signal(model, lambda model: setup.task.loss(model, batch)[0])  # noqa: B023 - called at once
            step = int(checkpoint.state["position"]["step"])
            signals.append(SignalOf(folder.name, step, found))
            rows.append({"run": folder.name, "update": step, "metrics": summarised(found)})
    draw_signal(signals, out)
    return rows


def analyze_mask(folders: Sequence[Path], data: str | None = None) -> list[dict[str, Any]]:
    """Table 6 on a run, or on several of one model, such as its seeds: metrics are lists with a value a run.

    Raises:
        UserError: a folder is no run, its model has a single step, or the runs are not of one model.
    """
    return _over_runs(mask_paths, folders, data)


def analyze_drop(folders: Sequence[Path], data: str | None = None, each: bool = False) -> list[dict[str, Any]]:
    """Table 7, or each single block's share, and raises UserError, as above."""
    return _over_runs(drop_each if each else drop_steps, folders, data)


def _over_runs(analysis: Analysis, folders: Sequence[Path], data: str | None) -> list[dict[str, Any]]:
    models = [recipe_of(folder).model for folder in folders]
    if different := [folder for folder, model in zip(folders, models) if model != models[0]]:
        raise UserError(f"analyze: {different[0]} is not of the model of {folders[0]}, expected runs of one model")
    found = [analysis(*_run(folder, data)) for folder in folders]
    return [
        {**rows[0], "metrics": {name: [row["metrics"][name] for row in rows] for name in rows[0]["metrics"]}}
        for rows in zip(*found)
    ]


def render_rows(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table: what was done, then the metrics, of several runs the mean ± sample deviation."""
    done = [key for key in rows[0] if key not in ("metrics", "blocks")]
    metrics = list(rows[0]["metrics"])
    lines = [
        "| " + " | ".join([*done, *metrics]).replace("_", " ") + " |",
        "|" + "---|" * len(done) + "---:|" * len(metrics),
    ]
    for row in rows:
        cells = [str(row[key]) for key in done] + [_said(row["metrics"][key]) for key in metrics]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _said(value: float | list[float]) -> str:
    if not isinstance(value, list):
        return f"{value:.4g}"
    deviation = f" ± {statistics.stdev(value):.2g}" if len(value) > 1 else ""
    return f"{statistics.fmean(value):.4g}{deviation}"


def _run(folder: Path, data: str | None) -> tuple[nn.Module, Evaluate]:
    recipe = recipe_of(folder)
    setup = set_up(recipe, data, folder)
    model, device = trained_model(folder, recipe, setup.model)
    return model, lambda model: setup.task.evaluate(model, Share(), device)
