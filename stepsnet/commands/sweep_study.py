"""`stepsnet sweep STUDY`: run, continue or render a declared study."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.writing import require_writable_folder
from ..output.console import choose_display
from ..output.summary_stats import percent
from ..output.terminal import say
from ..recipes import RECIPES, find_recipe
from ..report.t_interval import half_width
from ..report.words import count
from ..settings.consent import fetched_by, remember_as_asked, require_or_remember
from ..settings.overrides import override, parse_assignments
from ..study.conductor import conduct
from ..study.declare import Cell, Study
from ..study.pages import write_study
from ..study.record import OF_THE_MACHINE
from ..study.render import render_study
from ..study.results import check_results, read_results
from ..study.run_plan import a_final, check_models, data_of, due, progress, recipe_of, with_variant
from ..study.verdict import cannot_be_made
from .options import add_jobs_option

__all__ = ["run_study"]


def run_study(
    study: Study, file: Path | None, more: Sequence[str], overrides: Sequence[str], options: argparse.Namespace
) -> None:
    """Run or render a study and print its table.

    Args:
        file: the file that declares the study; None for one that comes with the package.
        more: further names on the command line; a study takes none.
        overrides: changes to settings that affect no result, and settings that repeat, as consent, what the study has
            fetched from the network.

    Raises:
        UserError: as for :func:`conduct`, or an argument that a study does not take.
    """
    if more or options.seeds:
        got = more[0] if more else f"--seeds {','.join(map(str, options.seeds))}"
        raise UserError(f"sweep: got {got} with the study {study.name}, expected the study alone: it declares the rest")
    if options.render:
        _refuse_beside_render(overrides, options)
    else:  # rendering fetches nothing
        overrides = _require_asked_for(study, file, overrides, options)
    for text in overrides:
        if text.partition("=")[0] not in OF_THE_MACHINE:
            free = ", ".join(sorted(OF_THE_MACHINE))
            raise UserError(f"sweep: got {text} with a study, whose settings are declared; expected one of {free}")
    cells = [study.cell(text, "--cells") for text in options.cells] if options.cells else study.cells
    folder = options.run or Path("runs") / study.folder
    results = options.results or folder / "results"
    if options.render:
        if not results.is_dir():
            wrong = "is not a folder" if results.exists() else "does not exist"
            raise UserError(f"--results: {results} {wrong}, expected a folder with the results of runs")
        if options.run:
            require_writable_folder(folder, "--run")
        check_models(study, options.data, open_data=False)  # rendering does not need the data
        there = check_results(study, results, options.data)
        if not there and any(results.iterdir()):
            raise UserError(f"--results: {results} has no results of {study.name}, expected those of its runs")
        say(write_study(study, there, folder) if options.run else render_study(study, there))
        return
    if options.dry_run:
        for run in due(study, {})[:1]:
            override(recipe_of(study, run, options.data), overrides)
        macs = check_models(study, options.data)
        say(_next_runs(study, check_results(study, results, data_of(study, options.data)), cells, macs))
        return
    for place, option in ((folder, "--run"), (results, "--results")):
        require_writable_folder(place, option)
    for line in cannot_be_made(study):
        say(line)

    def write() -> None:
        write_study(study, read_results(results, study), folder)

    settings = {"data": options.data, "free": tuple(overrides), "resume": options.resume, "after": write}
    with choose_display() as display:
        conduct(study, folder, results, options.jobs, display, cells=cells, **settings)
    there = check_results(study, results, options.data)  # another sweep may have added to them
    say(write_study(study, there, folder))


def _refuse_beside_render(overrides: Sequence[str], options: argparse.Namespace) -> None:
    """Raises UserError for what is about training, which ``--render`` does not do."""
    of_grids = argparse.ArgumentParser()
    add_jobs_option(of_grids)  # for its default
    given = {
        "--cells": options.cells,
        "--jobs": options.jobs != of_grids.get_default("jobs"),
        "--dry-run": options.dry_run,
        "--resume": options.resume,
        **dict.fromkeys(overrides, True),
    }
    if wrong := next((name for name, is_given in given.items() if is_given), None):
        raise UserError(f"sweep: got {wrong} with --render, which trains nothing, expected --results, --run and --data")


def _require_asked_for(
    study: Study, file: Path | None, overrides: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """Refuse to fetch what only the study's file names; returns the overrides without those that repeat it as consent.

    Raises:
        UserError: as :func:`..settings.consent.require_asked_for`, or a recipe that cannot be made.
    """
    typed = parse_assignments(overrides, "sweep")
    named: set[str] = set()
    for cell in study.cells:
        for variant in study.contender(cell.contender).tried:
            recipe = recipe_of(study, a_final(study, cell, variant), options.data)
            if file and (name := study.contender(cell.contender).recipe or study.recipe) in RECIPES:
                remember_as_asked(find_recipe(name))  # a recipe of this package counts as asked for
            again = [key for key, value in fetched_by(recipe).items() if typed.get(key) == value]
            require_or_remember(recipe, file, [*again, *["data"] * bool(options.data)])
            named.update(again)
    return [text for text in overrides if text.partition("=")[0] not in named]


def _next_runs(
    study: Study, there: Mapping[str, Any], cells: Sequence[Cell], macs: Mapping[tuple[Cell, str], int]
) -> str:
    done, expected = progress(study, there)
    lines = [
        f"{done} of {expected} runs of {study.name} are done, counting the grids of rates as they are now; due are:"
    ]
    lines += [f"  {run.name}" for run in due(study, there, cells)]
    lines += ["multiply-accumulates of a forward pass, per image or token:"]
    lines += [f"  {with_variant(cell, variant)}: {count(of)}" for (cell, variant), of in macs.items()]
    for level in sorted({criterion.level for criterion in study.criteria}):
        half = f"{half_width(len(study.seeds), level):.1f} standard deviations of the paired differences"
        lines.append(f"an interval of {percent(level)} over {len(study.seeds)} seeds reaches {half} to each side")
    lines += cannot_be_made(study)
    return "\n".join(lines)
