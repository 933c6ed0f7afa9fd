"""`stepsnet sweep`: a grid of recipes and seeds, such as depth × architecture, drawn against the depth."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, nearest
from ..runs.check import Checked, check_grid, tell
from ..runs.grid import SWEEP_FILE, Contender, train_grid
from ..terminal import counted, say
from .options import add_grid_options, add_run_options, say_forecasts

if TYPE_CHECKING:
    from ..config import Recipe
    from ..console import Display
    from ..run_folder import Resume

__all__ = ["sweep"]

HELP = "run a declared study, or train a grid of recipes and seeds (Fig. 1)"
KEPT = ("recipe", "label", "seed", "blocks", "layers", "params", "macs", "metrics")  # of each run, in sweep.json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "patterns",
        metavar="STUDY|RECIPE",
        nargs="*",
        help="a study's name or .yaml file, or recipes such as 'digits/steps_*'; without any, the studies are listed",
    )
    add_run_options(parser)
    add_grid_options(parser, None, "of recipes: each with each (default: each recipe's own)")
    parser.add_argument("--results", metavar="DIR", type=Path, help="of a study: a JSON per run (default: in --run)")
    parser.add_argument(
        "--cells",
        metavar="CONTENDER@POINT,…",
        type=lambda text: text.split(","),
        help="of a study: run these alone, as to share it among machines (default: all)",
    )
    parser.add_argument("--render", action="store_true", help="of a study: train nothing, render what is in --results")


def run(options: argparse.Namespace) -> None:
    from ..overrides import override
    from ..recipes import RECIPES, matching
    from ..study.declare import find_study, studies

    patterns = [text for text in options.patterns if "=" not in text]
    overrides = [text for text in options.patterns if "=" in text] + options.overrides
    if not patterns:
        given = (options.run, options.results, options.render, options.data, options.seeds, options.cells)
        if overrides or any(given):
            raise UserError("sweep: got neither a study nor recipes, expected some, such as 'digits/steps_*'")
        say("\n".join(studies()))
        return
    if study := find_study(patterns[0]):
        from .sweep_study import run_study

        run_study(study, patterns[1:], overrides, options)
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
    folder = options.run or Path("runs") / "sweep"
    if options.dry_run:
        from ..runs.grid import plan_grid

        contenders, _ = _contenders(recipes, options.seeds, options.jobs)
        plan_grid(contenders, folder, options.seeds, options.jobs, options.resume)
        runs = f"{counted(len(options.seeds or [0]) * len(recipes), 'run')}, {options.jobs} at once,"
        named = [(contender.recipe, f"{contender.name} ({contender.label})") for contender in contenders]
        say_forecasts(named, runs, folder)
        return
    sweep_and_tell(recipes, folder, options.seeds, options.jobs, options.resume)


def sweep_and_tell(
    recipes: Sequence[Recipe], folder: Path, seeds: Sequence[int] | None, jobs: int, resume: Resume
) -> None:
    """Sweep, or go on with it, and print what has come of it."""
    from ..console import choose_display

    with choose_display() as display:
        rows = sweep(recipes, folder, seeds, jobs, display, resume)
    names = len({row["recipe"] for row in rows})
    say(f"report: {folder / 'report.html'} — {counted(len(rows), 'run')} of {counted(names, 'recipe')}")


def sweep(
    recipes: Sequence[Recipe],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    display: Display,
    resume: Resume = False,
) -> list[dict[str, Any]]:
    """Train every recipe with every seed, ``jobs`` at once, and write ``sweep.json`` and ``report.html``.

    The report has the figure of Fig. 1 where the recipes are of several depths.

    Each run is an ordinary ``stepsnet train`` in a folder of its own. A sweep that was stopped, or that grows by
    recipes or seeds, trains only what is missing. Where a run fails, such as one that diverges, the others are trained
    and reported.

    Args:
        seeds: of every recipe; None: each has its own.

    Returns:
        A row for each run: recipe, label (StepsNet or baseline), seed, blocks, layers, params, macs, metrics.

    Raises:
        UserError: no recipe or seed, the folder is not empty and not resumed, a run in it is of
            another recipe, or a run failed.
    """
    from ..files import write_atomically

    contenders, checked = _contenders(recipes, seeds, jobs)
    if not (folder.exists() and any(folder.iterdir())):
        tell(display, [contender.name for contender in contenders], checked)
    trained = train_grid(contenders, folder, seeds, jobs, display, resume)
    rows = [{key: summary[key] for key in KEPT} for summary in trained.summaries()]
    write_atomically(folder / SWEEP_FILE, json.dumps(rows, indent=1) + "\n")
    names = dict.fromkeys([*(row["recipe"] for row in rows), *(recipe.name for recipe in recipes)])
    families = dict.fromkeys(name.partition("/")[0] for name in names)
    trained.write_report(folder / "report.html", f"{', '.join(families)}: {len(names)} recipes", display)
    return rows


def _contenders(
    recipes: Sequence[Recipe], seeds: Sequence[int] | None, jobs: int
) -> tuple[list[Contender], list[Checked]]:
    """Raises UserError for the mistakes that :func:`sweep` finds before it trains."""
    from ..models.blocks import is_in_steps
    from ..report.load_runs import BASELINE, STEPS

    if not recipes:
        raise UserError("sweep: got no recipe, expected at least one")
    checked = check_grid(recipes, [0] if seeds is None else seeds, jobs)
    labels = [STEPS if is_in_steps(one.model) else BASELINE for one in checked]
    named = zip(recipes, labels, checked)
    return [Contender(recipe.name, label, recipe, one.data_counts) for recipe, label, one in named], checked
