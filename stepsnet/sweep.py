"""A grid of recipes and seeds, such as depth × architecture: trained side by side, drawn against the depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compare import Contender, check_grid, train_grid
from .engine.console import Display
from .errors import UserError
from .files import write_atomically
from .recipes.recipe import Recipe
from .report import write_report
from .report.runs import BASELINE, STEPS
from .stream import widths_of

__all__ = ["sweep"]


def sweep(
    recipes: Sequence[Recipe], folder: Path, seeds: Sequence[int], jobs: int, display: Display, resume: bool = False
) -> list[dict[str, Any]]:
    """Train every recipe with every seed, ``jobs`` at once, and write ``sweep.json`` and ``report.html``.

    The report has the picture of Fig. 1 where the recipes are of several depths.

    Each run is an ordinary ``stepsnet train`` in a folder of its own. A sweep that was stopped, or that grows by
    recipes or seeds, trains only what is missing.

    Returns:
        A row for each run: recipe, label (StepsNet or baseline), seed, blocks, layers, params, macs, metrics.

    Raises:
        UserError: no recipe or seed, the folder is not empty and not resumed, a run in it is of
            another recipe, or a run failed.
    """
    if not recipes:
        raise UserError("sweep: got no recipe, expected at least one")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume trains what is missing in it)")
    models = check_grid(recipes, seeds, jobs)
    labels = [STEPS if len(set(widths_of(model))) > 1 else BASELINE for model in models]
    contenders = [Contender(recipe.name, label, recipe) for recipe, label in zip(recipes, labels)]
    runs = train_grid(contenders, folder, seeds, jobs, display)
    kept = ("recipe", "label", "seed", "blocks", "layers", "params", "macs", "metrics")
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    rows = [{key: summary[key] for key in kept} for summary in summaries]
    write_atomically(folder / "sweep.json", json.dumps(rows, indent=1) + "\n")
    families = dict.fromkeys(recipe.name.partition("/")[0] for recipe in recipes)
    title = f"{', '.join(families)}: {len(recipes)} recipes"
    write_report(runs, folder / "report.html", title)
    return rows
