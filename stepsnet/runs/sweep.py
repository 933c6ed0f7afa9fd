"""A grid of recipes and seeds, such as depth × architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.writing import dump_json, write_atomically
from ..models.blocks import is_in_steps
from ..models.grow.spec import with_sources
from ..output.console import Display
from ..report.load_runs import BASELINE, STEPS
from ..run_folder.resuming import Resume
from ..settings.config import Recipe
from .check import CheckedRecipe, check_grid, tell
from .grid import SWEEP_FILE, Entry, have_checkpoints, train_grid

__all__ = ["entries_of", "sweep"]

_KEPT = ("recipe", "label", "seed", "blocks", "layers", "params", "macs", "metrics")  # of each run, in sweep.json


def sweep(
    recipes: Sequence[Recipe],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    display: Display,
    resume: Resume = False,
) -> list[dict[str, Any]]:
    """Train every recipe with every seed, ``jobs`` at once, and write ``sweep.json`` and ``report.html``.

    The report has the figure of Fig. 1 if the recipes have several depths.

    Each run is an ordinary ``stepsnet train`` in a folder of its own. A sweep that was stopped, or that grows by
    recipes or seeds, trains only what is missing. If a run fails, for example by diverging, the others are still
    trained and reported.

    Args:
        seeds: for every recipe; None: each has its own.

    Returns:
        A row for each run: recipe, label (StepsNet or baseline), seed, blocks, layers, params, macs, metrics.

    Raises:
        UserError: there is no recipe or no seed, the folder is not empty and not resumed, a run in it has another
            recipe, or a run failed.
    """
    entries, checked = entries_of(recipes, folder, seeds, jobs)
    if not (folder.exists() and any(folder.iterdir())):
        tell(display, [entry.name for entry in entries], checked)
    trained = train_grid(entries, folder, seeds, jobs, display, resume)
    rows = [{key: summary[key] for key in _KEPT} for summary in trained.summaries()]
    write_atomically(folder / SWEEP_FILE, dump_json(rows, indent=1) + "\n")
    names = dict.fromkeys([*(row["recipe"] for row in rows), *(recipe.name for recipe in recipes)])
    families = dict.fromkeys(name.partition("/")[0] for name in names)
    trained.write_report(folder / "report.html", f"{', '.join(families)}: {len(names)} recipes", display)
    return rows


def entries_of(
    recipes: Sequence[Recipe], folder: Path, seeds: Sequence[int] | None, jobs: int
) -> tuple[list[Entry], list[CheckedRecipe]]:
    """Return a sweep's entries and checked recipes. Raises UserError for what :func:`sweep` refuses to train."""
    if not recipes:
        raise UserError("sweep: got no recipe, expected at least one")
    recipes = [with_sources(recipe) for recipe in recipes]
    there = [have_checkpoints(folder, recipe.name, [recipe.seed] if seeds is None else seeds) for recipe in recipes]
    checked = check_grid(recipes, [0] if seeds is None else seeds, jobs, has_checkpoints=there)
    labels = [STEPS if is_in_steps(one.model) else BASELINE for one in checked]
    named = zip(recipes, labels, checked)
    return [Entry(recipe.name, label, recipe, one.data_counts) for recipe, label, one in named], checked
