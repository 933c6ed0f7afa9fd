"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import Recipe

__all__ = ["add_grid_options", "add_run_options", "add_jobs_option", "integers", "recipe_and_folder", "typed_keys"]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the recipe, such as epochs=3")
    parser.add_argument("--data", help="where the data are: a folder, or KIND:PATH such as cifar10:PATH, hfds:NAME")
    parser.add_argument("--run", metavar="DIR", type=Path, help="the run folder (default: runs/ and the recipe's name)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="continue what was started in that folder")
    either.add_argument(
        "--auto-resume",
        dest="resume",
        action="store_const",
        const="auto",
        help="continue it, or start it where there is nothing: for job scripts that are run again",
    )


def add_grid_options(parser: argparse.ArgumentParser, seeds: list[int] | None, seeds_help: str) -> None:
    parser.add_argument("--seeds", metavar="S,S,…", type=integers, default=seeds, help=seeds_help)
    add_jobs_option(parser)


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, which share the cores (default: 2)")


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
    from ..consent import ask_for, check_asked_for
    from ..overrides import override, read_recipe
    from ..recipes import find_recipe

    is_file = options.recipe.endswith((".yaml", ".yml"))
    recipe = read_recipe(Path(options.recipe)) if is_file else find_recipe(options.recipe)
    if options.data:
        recipe = dataclasses.replace(recipe, data=options.data)
    recipe = override(recipe, options.overrides)
    if is_file:
        check_asked_for(recipe, Path(options.recipe), typed_keys(options))
    else:
        ask_for(recipe)
    folder = options.run
    if folder is None and options.resume and is_file:
        folder = _run_of(Path(options.recipe))
    return recipe, folder or Path("runs") / recipe.name.replace("/", "-")


def typed_keys(options: argparse.Namespace) -> list[str]:
    """The keys of a recipe that the command line gives."""
    return [text.partition("=")[0] for text in options.overrides] + ["data"] * bool(options.data)


def _run_of(file: Path) -> Path | None:
    """The run folder that a file is the ``config.yaml`` of."""
    is_run = any((file.parent / name).exists() for name in (".lock", "metrics.jsonl", "checkpoints"))
    return file.parent if file.name == "config.yaml" and is_run else None
