"""A script for bash, zsh or fish that completes verbs, options, recipes and files; made by shtab."""

from __future__ import annotations

import argparse
import shlex

__all__ = ["completion_script"]

_RECIPES = ("recipe", "patterns")  # arguments by their names in the parsers
_FILES, _FOLDERS = ("FILE", "MODEL"), ("DIR", "RUN")  # by what they are called in the help


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script. It holds the names of today's recipes, so that completing runs no program."""
    import shtab

    from ..recipes import RECIPES
    from ..study.declare import studies

    # each of the shells splits what has one name per line
    recipes = shtab.cmd(shlex.join(["printf", "%s\\n", *RECIPES]))
    recipes_or_studies = shtab.cmd(shlex.join(["printf", "%s\\n", *RECIPES, *studies()]))
    for verb, sub in _verbs(parser).items():
        for action in sub._actions:
            if action.dest in _RECIPES:
                completed: object = recipes_or_studies if verb == "sweep" else recipes
            elif action.metavar in _FOLDERS:
                completed = shtab.DIRECTORY
            elif action.metavar in _FILES:
                completed = shtab.FILE
            else:
                continue
            action.complete = completed  # type: ignore[attr-defined] # where shtab looks
    return shtab.complete(parser, shell)


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(subparsers.choices)
