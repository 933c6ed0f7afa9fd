"""`stepsnet resume`: continue a run, a comparison or a sweep from its folder, which records all that is needed."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .options import add_jobs_option, place, typed_keys

if TYPE_CHECKING:
    from ..settings.config import Recipe

HELP = "continue a run, a comparison or a sweep from its folder alone, also for more epochs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, a comparison or a sweep")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="epochs=N trains for longer; also workers, device and the like",
    )
    parser.add_argument("--data", type=place, help="where the data are now, if they have moved")
    add_jobs_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..run_folder.folder import CONFIG, RECIPES_FOLDER, kind_of, recipes_of_runs, require_run
    from ..settings.consent import require_asked_for
    from ..settings.overrides import override, read_recipe

    def changed(recipe: Recipe, file: Path) -> Recipe:
        recipe = dataclasses.replace(recipe, data=options.data) if options.data else recipe
        recipe = override(recipe, options.overrides)
        require_asked_for(recipe, file, typed_keys(options))
        return recipe

    kind, config = kind_of(options.folder), options.folder / CONFIG
    if kind == "run":
        from .train import train_and_tell

        require_run(options.folder)
        train_and_tell(changed(read_recipe(config), config), options.folder, "extend")
    elif kind == "comparison":
        from .compare import compare_and_tell

        recipe = changed(read_recipe(config), config)
        seeds = sorted({inner.seed for inner in recipes_of_runs(options.folder).values()})
        compare_and_tell(recipe, options.folder, seeds, options.jobs, "extend")
    else:
        from .sweep import sweep_and_tell

        inside = options.folder / RECIPES_FOLDER
        recipes = [changed(recipe, inside / f"{name}.yaml") for name, recipe in _sweep(options.folder).items()]
        sweep_and_tell(recipes, options.folder, None, options.jobs, "extend")


def _sweep(folder: Path) -> dict[str, Recipe]:
    """The recipes of a sweep's runs, by their names. Raises UserError if the folder is not a sweep's."""
    from ..run_folder.folder import recipes_of_runs
    from ..runs.grid import run_name

    found = recipes_of_runs(folder)
    for name, recipe in found.items():
        if name != run_name(recipe.name, recipe.seed):
            raise UserError(
                f"resume: {folder} is not the folder of a sweep of recipes (it has the run {name}); continue a study "
                "with `stepsnet sweep STUDY --run … --resume`, a comparison with `stepsnet compare … --resume`"
            )
    return found
