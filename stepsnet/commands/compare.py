"""`stepsnet compare`: a StepsNet and its baseline under one recipe, with the same data, settings and seeds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..output.terminal import counted, say
from .options import add_grid_options, add_run_options, recipe_and_folder, say_forecasts

if TYPE_CHECKING:
    from ..run_folder.resuming import Resume
    from ..settings.config import Recipe

HELP = "train a StepsNet and its baseline under one recipe, side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a name from `stepsnet recipes`, or a .yaml file")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="in place of a recipe: any timm model, or transformers:FOLDER, against its StepsNet",
    )
    add_run_options(parser)
    add_grid_options(parser, "a pair of runs for each seed (default: the recipe's)")


def run(options: argparse.Namespace) -> None:
    recipe, folder = recipe_and_folder(options)
    seeds = options.seeds or [recipe.seed]
    if options.dry_run:
        _forecast(recipe, folder, seeds, options.jobs, options.resume)
    else:
        compare_and_tell(recipe, folder, seeds, options.jobs, options.resume)


def _forecast(recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, resume: Resume) -> None:
    """Find the mistakes that :func:`compare_and_tell` would find before it trains, and say what would be trained."""
    from ..models.grow.spec import with_sources
    from ..run_folder.resuming import settle_recipe
    from ..runs.compare import check_entries, entries_of

    recipe = settle_recipe(folder, with_sources(recipe), resume, is_grid=True)
    entries = entries_of(recipe)
    checked = check_entries(entries, folder, seeds, jobs)
    runs = f"{counted(2 * len(seeds), 'run')}, {jobs} at once,"
    named = [(entry.recipe, entry.label) for entry in entries]
    say_forecasts(named, runs, folder, past=[one.has_checkpoints for one in checked])


def compare_and_tell(recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, resume: Resume) -> None:
    """Run a comparison, or continue one, and print its result."""
    from ..metrics import headline
    from ..output.console import choose_display

    with choose_display() as display:
        from ..runs.compare import compare  # takes seconds
        from ..runs.report import where_to_look

        summary = compare(recipe, folder, seeds, jobs, display, resume)
    said, count = [], len(summary["seeds"])
    without = f"; {' and '.join(summary['diverged'])} diverged, left out of the means" if "diverged" in summary else ""
    for name in ("StepsNet", "baseline"):
        means = {key: value["mean"] for key, value in summary[name].items()}
        said.append(f"{name} {headline(means, 'val')}")
    say(
        f"{where_to_look(folder)} — validation after {counted(recipe.epochs, 'epoch')}"
        f"{f', mean of {count} seeds' if count > 1 else ''}: {', '.join(said)}{without}"
    )
