"""`stepsnet sweep`: a grid of recipes and seeds, such as depth × architecture, drawn against the depth."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError, nearest
from ..output.terminal import counted, say
from .options import add_grid_options, add_run_options, say_forecasts

if TYPE_CHECKING:
    from ..run_folder.resuming import Resume
    from ..settings.config import Recipe

HELP = "run a declared study, or train a grid of recipes and seeds (Fig. 1)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "patterns",
        metavar="STUDY|RECIPE",
        nargs="*",
        help="a study's name or .yaml file, or recipes such as 'digits/steps_*'; without any, the studies are listed",
    )
    add_run_options(parser)
    add_grid_options(parser, "for recipes: the seeds that each is trained with (default: its own)")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, help="for a study: folder of its results (default: results/ in --run)"
    )
    parser.add_argument(
        "--cells",
        metavar="CONTENDER@POINT,…",
        type=lambda text: [cell.strip() for cell in text.split(",")],
        help="for a study: run only these, for example to share it among machines (default: all)",
    )
    parser.add_argument("--render", action="store_true", help="for a study: train nothing, render what is in --results")


def run(options: argparse.Namespace) -> None:
    from ..files.reading import yaml_file
    from ..recipes import RECIPES, matching
    from ..settings.consent import require_or_remember
    from ..settings.overrides import override
    from ..study.declare import find_study, studies

    patterns = [text for text in options.patterns if "=" not in text]
    overrides = [text for text in options.patterns if "=" in text] + options.overrides
    if not patterns:
        of_studies = (options.results, options.cells, options.render)
        given = (overrides, options.data, options.run, options.dry_run, options.resume, options.seeds, *of_studies)
        if any(given):
            raise UserError(
                "sweep: got neither a study nor recipes, expected one or the other, such as 'digits/steps_*'"
            )
        say("\n".join(studies()))
        return
    if study := find_study(patterns[0]):
        from .sweep_study import run_study

        run_study(study, yaml_file(patterns[0]), patterns[1:], overrides, options)
        return
    for option in ("results", "render", "cells"):
        if getattr(options, option):
            hint = nearest(patterns[0], studies())
            raise UserError(f"sweep: got {patterns[0]}, expected a study for --{option}{hint}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in RECIPES):
            hint = nearest(pattern, [*studies(), *RECIPES])
            raise UserError(f"sweep: got {pattern!r}, expected a study or recipes{hint}")
    recipes = matching(patterns)
    if options.data:
        recipes = [dataclasses.replace(recipe, data=options.data) for recipe in recipes]
    recipes = [override(recipe, overrides) for recipe in recipes]
    for recipe in recipes:
        require_or_remember(recipe, None, ())  # all of these come with the package
    folder = options.run or Path("runs") / "sweep"
    if options.dry_run:
        from ..runs.grid import plan_grid
        from ..runs.sweep import entries_of

        entries, checked = entries_of(recipes, folder, options.seeds, options.jobs)
        plan_grid(entries, folder, options.seeds, options.jobs, options.resume)
        runs = f"{counted(len(options.seeds or [0]) * len(recipes), 'run')}, {options.jobs} at once,"
        named = [(entry.recipe, f"{entry.name} ({entry.label})") for entry in entries]
        say_forecasts(named, runs, folder, past=[one.has_checkpoints for one in checked])
        return
    sweep_and_tell(recipes, folder, options.seeds, options.jobs, options.resume)


def sweep_and_tell(
    recipes: Sequence[Recipe], folder: Path, seeds: Sequence[int] | None, jobs: int, resume: Resume
) -> None:
    """Run a sweep, or continue one, and print its result."""
    from ..output.console import choose_display

    with choose_display() as display:
        from ..runs.report import where_to_look
        from ..runs.sweep import sweep  # takes seconds

        rows = sweep(recipes, folder, seeds, jobs, display, resume)
    names = len({row["recipe"] for row in rows})
    say(f"{where_to_look(folder)} — {counted(len(rows), 'run')} of {counted(names, 'recipe')}")
