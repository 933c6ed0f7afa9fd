"""A StepsNet and its baseline under one recipe, with the same data, settings and seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.writing import dump_json, write_atomically
from ..models.grow.spec import with_sources
from ..output.console import Display
from ..output.summary_stats import mean_and_std
from ..report.load_runs import BASELINE, STEPS
from ..run_folder.folder import has_begun
from ..run_folder.records import diverged_at
from ..run_folder.resuming import Resume, settle_recipe
from ..settings.config import Recipe
from ..settings.from_data import with_baseline
from .check import CheckedRecipe, check_grid, tell
from .grid import COMPARISON_FILE, Entry, have_checkpoints, train_grid

__all__ = ["check_entries", "compare", "entries_of", "summarize"]


def compare(
    recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, display: Display, resume: Resume = False
) -> dict[str, Any]:
    """Train both models with every seed, ``jobs`` at once, and write ``comparison.json`` and ``report.html``.

    Each run is an ordinary ``stepsnet train`` in a folder of its own, with its share of the cores; a
    comparison that was stopped is resumed run by run. If a run fails, the others are still trained and reported, but
    no ``comparison.json`` is written, since a mean over just the seeds that succeeded would be biased.

    Raises:
        UserError: the recipe has no baseline, the folder is not empty, or a run failed.
        Interrupted: a signal arrived.
    """
    is_new = not (resume and has_begun(folder))
    recipe = settle_recipe(folder, with_sources(recipe), resume, is_grid=True)
    entries = entries_of(recipe)
    steps, baseline = check_entries(entries, folder, seeds, jobs)
    if is_new:
        recipe = with_baseline(steps.recipe, baseline.recipe)
        tell(display, [entry.name for entry in entries], [steps, baseline])
    both = zip(entries, (steps, baseline))
    entries = [dataclasses.replace(entry, data_counts=one.data_counts) for entry, one in both]
    trained = train_grid(entries, folder, seeds, jobs, display, resume, recipe)
    result: dict[str, Any] = {}
    if not trained.failed:
        result = summarize(trained.summaries())
        if diverged := [run.name for run in trained.runs if diverged_at(run) is not None]:
            result["diverged"] = diverged  # in an earlier call; in no mean
        if unlike := trained.seeds_of_unlike_schedules():
            result["unlike_schedules"] = unlike
            text = f"seeds {', '.join(map(str, unlike))}: when the epochs were changed, one of the two runs was ahead"
            display.note(folder.name, f"{text} of the other, so their schedules differ")
        write_atomically(folder / COMPARISON_FILE, dump_json(result, indent=2) + "\n")
    trained.write_report(folder / "report.html", f"{recipe.name}: StepsNet and its baseline", display)
    return result


def entries_of(recipe: Recipe) -> list[Entry]:
    """The recipe and its baseline. Raises UserError if it has none."""
    return [Entry("StepsNet", STEPS, recipe), Entry("baseline", BASELINE, recipe.of_baseline())]


def check_entries(entries: Sequence[Entry], folder: Path, seeds: Sequence[int], jobs: int) -> list[CheckedRecipe]:
    """Check as :func:`.check.check_grid` does, where some of the runs may already exist."""
    there = [have_checkpoints(folder, entry.name, seeds) for entry in entries]
    return check_grid([entry.recipe for entry in entries], seeds, jobs, has_checkpoints=there)


def summarize(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, sample standard deviation and the paired difference (StepsNet - baseline) over the seeds."""
    by_label: dict[str, dict[int, dict[str, float]]] = {}
    for summary in summaries:
        by_label.setdefault(summary["label"], {})[summary["seed"]] = summary["metrics"]
    steps, baseline = by_label[STEPS], by_label[BASELINE]
    every = [*steps.values(), *baseline.values()]  # a metric that is not finite is missing
    names = [name for name in every[0] if not name.startswith("best_") and all(name in metrics for metrics in every)]
    seeds = sorted(steps.keys() & baseline.keys())
    return {
        "recipe": summaries[0]["recipe"],
        "seeds": seeds,
        **{
            label: {name: mean_and_std([runs[seed][name] for seed in seeds]) for name in names}
            for label, runs in by_label.items()
        },
        "difference": {
            name: mean_and_std([steps[seed][name] - baseline[seed][name] for seed in seeds]) for name in names
        },
    }
