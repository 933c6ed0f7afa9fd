"""`stepsnet compare`: a StepsNet and its baseline under one recipe, with the same data, settings and seeds."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs.launch import Contender, check_grid, train_grid
from .options import add_grid_options, add_run_options, recipe_and_folder

if TYPE_CHECKING:
    from ..config import Recipe
    from ..console import Display
    from ..run_folder import Resume

__all__ = ["compare", "summarize"]

HELP = "train a StepsNet and its baseline under one recipe, side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    add_run_options(parser)
    add_grid_options(parser, None, "a pair of runs for each seed (default: the recipe's)")


def run(options: argparse.Namespace) -> None:
    recipe, folder = recipe_and_folder(options)
    compare_and_tell(recipe, folder, options.seeds or [recipe.seed], options.jobs, options.resume)


def compare_and_tell(recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, resume: Resume) -> None:
    """Compare, or go on with it, and print what has come of it."""
    from ..console import choose_display
    from ..metrics import headline

    with choose_display() as display:
        summary = compare(recipe, folder, seeds, jobs, display, resume)
    said = []
    for name in ("StepsNet", "baseline"):
        means = {key: value["mean"] for key, value in summary[name].items()}
        said.append(f"{name} {headline(means, 'val')}")
    print(
        f"report: {folder / 'report.html'} — validation after {recipe.epochs} epochs"
        f"{f', mean of {len(seeds)} seeds' if len(seeds) > 1 else ''}: {', '.join(said)}"
    )


def compare(
    recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, display: Display, resume: Resume = False
) -> dict[str, Any]:
    """Train both models with every seed, ``jobs`` at once, and write ``comparison.json`` and ``report.html``.

    Each run is an ordinary ``stepsnet train`` in a folder of its own, with its share of the cores; a
    comparison that was stopped is resumed run by run.

    Raises:
        UserError: the recipe has no baseline, the folder is not empty, or a run failed.
        Interrupted: a signal.
    """
    from ..files import write_atomically
    from ..report import write_report
    from ..report.load_runs import BASELINE, STEPS
    from ..run_folder import read_summary

    contenders = [Contender("StepsNet", STEPS, recipe), Contender("baseline", BASELINE, recipe.of_baseline())]
    check_grid([contender.recipe for contender in contenders], seeds, jobs)
    runs = train_grid(contenders, folder, seeds, jobs, display, resume, recipe)
    summary = summarize([summary for run in runs if (summary := read_summary(run))])
    write_atomically(folder / "comparison.json", json.dumps(summary, indent=2) + "\n")
    write_report(runs, folder / "report.html", f"{recipe.name}: StepsNet and its baseline")
    return summary


def summarize(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, sample standard deviation and the paired difference (StepsNet - baseline) over the seeds."""
    by_label: dict[str, dict[int, dict[str, float]]] = {}
    for summary in summaries:
        by_label.setdefault(summary["label"], {})[summary["seed"]] = summary["metrics"]
    steps, baseline = by_label["StepsNet"], by_label["baseline"]
    every = [*steps.values(), *baseline.values()]  # a metric that is not finite is missing
    names = [name for name in every[0] if not name.startswith("best_") and all(name in metrics for metrics in every)]
    seeds = sorted(steps.keys() & baseline.keys())
    return {
        "recipe": summaries[0]["recipe"],
        "seeds": seeds,
        **{
            label: {name: _mean_and_std([runs[seed][name] for seed in seeds]) for name in names}
            for label, runs in by_label.items()
        },
        "difference": {
            name: _mean_and_std([steps[seed][name] - baseline[seed][name] for seed in seeds]) for name in names
        },
    }


def _mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": deviation, "values": list(values)}
