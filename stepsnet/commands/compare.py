"""`stepsnet compare`: a StepsNet and its baseline under one recipe, with the same data, settings and seeds."""

from __future__ import annotations

import argparse

from ..terminal import counted, say
from .options import add_grid_options, add_run_options, recipe_and_folder, say_forecasts

HELP = "train a StepsNet and its baseline under one recipe, side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a name from `stepsnet recipes`, or a .yaml file")
    parser.add_argument("--model", metavar="NAME", help="any timm model in place of a recipe, and its StepsNet")
    add_run_options(parser)
    add_grid_options(parser, None, "a pair of runs for each seed (default: the recipe's)")


def run(options: argparse.Namespace) -> None:
    from ..console import choose_display
    from ..metrics import headline
    from ..run_folder import check_run_folder
    from ..runs.check import check_grid
    from ..runs.compare import compare, contenders_of

    recipe, folder = recipe_and_folder(options)
    seeds = options.seeds or [recipe.seed]
    if options.dry_run:
        contenders = contenders_of(recipe)
        check_grid([contender.recipe for contender in contenders], seeds, options.jobs)
        check_run_folder(folder, recipe, options.resume)
        runs = f"{counted(2 * len(seeds), 'run')}, {options.jobs} at once, would be in {folder}"
        say_forecasts([(contender.recipe, contender.label) for contender in contenders], runs)
        return
    with choose_display() as display:
        summary = compare(recipe, folder, seeds, options.jobs, display, options.resume)
    said = []
    for name in ("StepsNet", "baseline"):
        means = {key: value["mean"] for key, value in summary[name].items()}
        said.append(f"{name} {headline(means, 'val')}")
    say(
        f"report: {folder / 'report.html'} — validation after {counted(recipe.epochs, 'epoch')}"
        f"{f', mean of {len(seeds)} seeds' if len(seeds) > 1 else ''}: {', '.join(said)}"
    )
