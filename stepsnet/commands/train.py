"""`stepsnet train`: train a recipe in a folder of its own, or continue there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..output.terminal import counted, say
from .options import add_run_options, recipe_and_folder, say_forecasts

if TYPE_CHECKING:
    from ..run_folder.resuming import Resume
    from ..settings.config import Recipe

HELP = "train a recipe, or continue a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    add_run_options(parser)


def run(options: argparse.Namespace) -> None:
    train_or_forecast(*recipe_and_folder(options), options)


def train_or_forecast(recipe: Recipe, folder: Path, options: argparse.Namespace) -> None:
    """Train a recipe in a folder, or with ``--dry-run`` show what would be trained."""
    if options.dry_run:
        from ..models.grow.spec import with_sources
        from ..run_folder.resuming import settle_recipe

        recipe = settle_recipe(folder, with_sources(recipe), options.resume)
        say_forecasts([(recipe, "")], "the run", folder, bool(options.resume))
    else:
        train_and_tell(recipe, folder, options.resume)


def train_and_tell(recipe: Recipe, folder: Path, resume: Resume) -> None:
    """Train a recipe in a folder, or continue there, and print the result."""
    from ..metrics import SPLIT_NAMES, headline
    from ..output.console import choose_display

    with choose_display() as display:
        from ..runs.report import where_to_look
        from ..runs.train import train_run  # takes seconds

        summary = train_run(recipe, folder, display, resume)
    if summary:
        parts = {SPLIT_NAMES[split]: headline(summary["metrics"], split) for split in ("val", "train")}
        said = ", ".join(f"{split} {text}" for split, text in parts.items() if text)
        say(f"{where_to_look(folder)} — after {counted(summary['epochs'], 'epoch')}: {said}")
