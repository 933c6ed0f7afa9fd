"""A grid of recipes and seeds, such as depth × architecture: trained side by side, drawn against the depth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .compare import run_all
from .engine.console import Display
from .errors import UserError
from .files import write_atomically
from .models.build import build_model
from .recipes.recipe import Recipe, to_yaml
from .report.depth import draw_depth
from .report.runs import BASELINE, STEPS
from .stream import widths_of

__all__ = ["sweep"]


def sweep(
    recipes: Sequence[Recipe], folder: Path, seeds: Sequence[int], jobs: int, display: Display, resume: bool = False
) -> list[dict[str, Any]]:
    """Train every recipe with every seed, ``jobs`` at once, and write ``sweep.json`` and the picture of Fig. 1.

    Each run is an ordinary ``stepsnet train`` in a folder of its own. A sweep that was stopped, or that grows by
    recipes or seeds, trains only what is missing.

    Returns:
        A row for each run: recipe, label (StepsNet or baseline), seed, blocks, layers, params, macs, metrics.

    Raises:
        UserError: no recipe or seed, the folder is not empty and not resumed, or a run failed.
    """
    if jobs < 1 or not recipes or not seeds or len(set(seeds)) != len(seeds):
        got = f"{len(recipes)} recipes, seeds {list(seeds)} and {jobs} jobs"
        raise UserError(f"sweep: got {got}, expected at least one of each, and distinct seeds")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume trains what is missing in it)")
    labels = {}
    with torch.device("meta"):
        for recipe in recipes:  # a mistake in one is said before anything is trained
            several = len(set(widths_of(build_model(recipe.model)))) > 1
            labels[recipe.name] = STEPS if several else BASELINE
    waiting, runs = [], []
    for seed in seeds:
        for recipe in recipes:
            run = folder / f"{recipe.name.replace('/', '-')}-seed{seed}"
            config = folder / "recipes" / f"{run.name}.yaml"
            write_atomically(config, to_yaml(dataclasses.replace(recipe, baseline=None, seed=seed)))
            runs.append(run)
            if not (run / "summary.json").exists():
                waiting.append((f"{recipe.name}, seed {seed}", labels[recipe.name], config, run))
    if waiting:
        run_all(waiting, jobs, display)
    kept = ("recipe", "label", "seed", "blocks", "layers", "params", "macs", "metrics")
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    rows = [{key: summary[key] for key in kept} for summary in summaries]
    write_atomically(folder / "sweep.json", json.dumps(rows, indent=1) + "\n")
    draw_depth(rows, folder)
    return rows
