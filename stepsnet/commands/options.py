"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..machine import is_main_process
from ..output.terminal import say

if TYPE_CHECKING:
    from ..settings.config import Recipe

__all__ = [
    "add_grid_options",
    "add_import_option",
    "add_jobs_option",
    "add_json_option",
    "add_run_options",
    "import_modules",
    "integers",
    "place",
    "recipe_and_folder",
    "runs_inside",
    "say_forecasts",
    "say_how_far",
    "seed_list",
    "typed_keys",
    "whole",
]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to the recipe, such as epochs=3"
    )
    parser.add_argument(
        "--data", type=place, help="where the data are: a folder, or KIND:PATH such as cifar10:PATH or hfds:NAME"
    )
    parser.add_argument("--run", metavar="DIR", type=Path, help="the run folder (default: in runs/, by name)")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be trained: recipe, updates, sizes; train nothing"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="continue what was started in the run folder")
    either.add_argument(
        "--auto-resume",
        dest="resume",
        action="store_const",
        const="auto",
        help="continue it, or start it if there is nothing yet: for job scripts that are run again",
    )


def add_grid_options(parser: argparse.ArgumentParser, seeds_help: str) -> None:
    parser.add_argument("--seeds", metavar="S,S,…", type=seed_list, help=seeds_help)
    add_jobs_option(parser)


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=whole(1, 1024), default=2, help="runs at once, which share the cores (default: 2)"
    )


def add_json_option(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def say_forecasts(
    recipes: Sequence[tuple[Recipe, str]], runs: str, folder: Path, resumes: bool = False, past: Sequence[bool] = ()
) -> None:
    """Print what ``--dry-run`` shows: a forecast for each recipe, given with its model's label, and where runs go.

    Under torchrun, only rank 0 prints.

    Args:
        resumes: whether the single run in ``folder`` is continued if it has begun.
        past: for each recipe, whether its runs in ``folder`` no longer need the weights that they start from.
    """
    from ..files.writing import require_writable_folder
    from ..output.console import working

    require_writable_folder(folder, "--run")
    with working("building the model and loading a batch"):
        from ..runs.dry_run import forecast, render_forecasts  # takes seconds

        resumed = folder if resumes else None
        each = zip(recipes, past or [False] * len(recipes))
        found = [forecast(recipe, label, resumed, is_past) for (recipe, label), is_past in each]
    if is_main_process():
        say(render_forecasts(found, f"{runs} would be in {folder}"))


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--import``, for commands without a recipe, which would name the modules under ``import``."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module of your own to import first",
    )


def import_modules(options: argparse.Namespace) -> None:
    """Import the modules that ``--import`` names. Raises UserError if that fails."""
    from ..settings.user_modules import import_user_modules

    import_user_modules(options.imports)


def whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``least`` to ``most``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text[:40]!r}, expected a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text[:40]}, expected {least} to {most}")
        return value

    return number


def place(text: str) -> str:
    """An argparse type: a place of data. Empty text, as from an unset variable in a script, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a folder, or KIND:PATH such as cifar10:PATH")
    return text


def seed_list(text: str) -> list[int]:
    seed = whole(0, 2**63 - 1)
    return [seed(part) for part in text.split(",")]


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 0,1,2") from None


def recipe_and_folder(options: argparse.Namespace) -> tuple[Recipe, Path]:
    """The recipe that the arguments name, with their changes, and the folder of its run.

    Raises:
        UserError: there is no such recipe, or a change to it is wrong.
    """
    from ..files.reading import yaml_file
    from ..recipes import find_or_read
    from ..recipes.any_model import with_like_baseline, with_vocabulary
    from ..run_folder.resuming import folder_of
    from ..settings.consent import require_or_remember
    from ..settings.overrides import override

    if getattr(options, "model", None):
        recipe = _pair_of_model(options)
    elif options.recipe is None:
        raise UserError("recipe: got none, expected a name from `stepsnet recipes`, a .yaml file, or --model NAME")
    else:
        recipe = find_or_read(options.recipe)
    if options.data:
        recipe = dataclasses.replace(recipe, data=options.data)
    recipe = override(recipe, options.overrides)
    if getattr(options, "model", None):
        recipe = with_vocabulary(with_like_baseline(recipe, typed_keys(options)))
    file = yaml_file(options.recipe or "")
    require_or_remember(recipe, file, typed_keys(options))
    return recipe, options.run or folder_of(recipe, file, options.resume)


def typed_keys(options: argparse.Namespace) -> list[str]:
    """The keys of the recipe that are set on the command line."""
    return [text.partition("=")[0] for text in options.overrides] + ["data"] * bool(options.data)


def runs_inside(folder: Path, *, or_checkpoint: bool = False) -> list[Path]:
    """The runs with weights in the folder of a comparison or a sweep; for a run's folder, that folder alone.

    Args:
        or_checkpoint: take the folder of a run's checkpoint too, also alone.

    Raises:
        UserError: the folder is not that of a run, or none of the runs in it has weights.
    """
    from ..run_folder.folder import find_runs, has_weights, require_run

    runs = find_runs([folder])
    if runs == [folder]:
        require_run(folder, or_checkpoint=or_checkpoint)
        return runs
    trained = [run for run in runs if has_weights(run)]
    for run in runs:
        if run not in trained:
            say(f"stepsnet: {run} has no weights yet, and is left out", error=True)
    if not trained:
        raise UserError(f"run: none of the {len(runs)} runs in {folder} has weights yet")
    return trained


def say_how_far(run: Path) -> None:
    """If a run has not ended, say on stderr at which update its weights were saved."""
    from ..run_folder.folder import on_unfinished

    for line in on_unfinished(run):
        say(f"stepsnet: {line}", error=True)


def _pair_of_model(options: argparse.Namespace) -> Recipe:
    """The recipe for ``--model NAME``; the first positional argument is then an override instead of a recipe."""
    from ..recipes.any_model import stepify_pair

    if options.recipe is not None:
        if "=" not in options.recipe:
            raise UserError(
                f"--model: got {options.model} beside the recipe {options.recipe}, expected only one of them"
            )
        options.overrides.insert(0, options.recipe)
    if not options.data:
        raise UserError(
            f"--data: got none with --model {options.model}, expected the place of the data, such as folder:PATH"
        )
    return stepify_pair(options.model, options.data)
