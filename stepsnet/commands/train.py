"""`stepsnet train`: train a recipe in a folder of its own, or continue there."""

from __future__ import annotations

import argparse

from ..terminal import counted, say
from .options import add_run_options, recipe_and_folder, say_forecasts

HELP = "train a recipe, or continue a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    add_run_options(parser)


def run(options: argparse.Namespace) -> None:
    from ..console import choose_display
    from ..from_data import as_begun
    from ..metrics import SPLITS, headline
    from ..run_folder import check_run_folder, read_run_recipe

    recipe, folder = recipe_and_folder(options)
    if options.dry_run:
        if check_run_folder(folder, recipe, options.resume):
            recipe = as_begun(recipe, read_run_recipe(folder))
        say_forecasts([(recipe, "")], f"the run would be in {folder}")
        return
    with choose_display() as display:
        from ..runs.train import train_run  # takes seconds

        summary = train_run(recipe, folder, display, options.resume)
    if summary:
        parts = {SPLITS[split]: headline(summary["metrics"], split) for split in ("val", "train")}
        said = ", ".join(f"{split} {text}" for split, text in parts.items() if text)
        say(f"report: {folder / 'report.html'} — after {counted(summary['epochs'], 'epoch')}: {said}")
