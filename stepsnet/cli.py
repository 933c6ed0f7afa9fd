"""The command line, which maps verbs to functions and does nothing else. Each verb is a file in commands/."""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .errors import UserError, exit_status, nearest
from .output.terminal import say

VERBS = (
    "train",
    "resume",
    "compare",
    "sweep",
    "eval",
    "predict",
    "analyze",
    "bench",
    "report",
    "push",
    "export",
    "models",
    "recipes",
    "plan",
    "memory",
    "stepify",
    "grow",
    "table",
)
SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (errors.py lists them)."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would warn about a home that it cannot write to
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: _run(given), "--debug" in given)


def _run(given: list[str]) -> None:
    parser = _parser()
    if not given:  # as in git, click and clap: the help, but a failure, for a script that has lost its verb
        say(parser.format_help(), error=True, end="")
        raise SystemExit(2)
    if not given[0].startswith("-") and given[0] not in VERBS:
        raise UserError(f"got {given[0]!r}, expected a verb that `stepsnet --help` lists{nearest(given[0], VERBS)}")
    options, rest = parser.parse_known_args(given)
    if rest and given[0] in VERBS:  # argparse takes no positional arguments after an option's unless told to
        options, rest = options.parser.parse_known_intermixed_args(given[1:])
    if rest:
        rest = [argument for argument in rest if argument.startswith("-")] or rest  # the others may be its values
        known = dict.fromkeys(re.findall(r"--[\w-]+", options.parser.format_help()))
        hint = nearest(rest[0].partition("=")[0], known) if given[0] in VERBS else " before the verb"
        options.parser.error(f"got {' '.join(rest)}, expected no such argument{hint}")
    options.verb(options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message} (see {self.prog} --help)", error=True)
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise OutputLost if standard output cannot be written; argparse's own method would ignore that."""
        say(message, error=file is not sys.stdout, end="")


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option_string: Any = None) -> None:
        from .commands.completion import completion_script

        say(completion_script(parser, shell))
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stepsnet", description="Step by Step Network: very deep networks that train.")
    parser.add_argument("--version", action="version", version=f"stepsnet {__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, action=_PrintCompletion, help="print a script that completes commands"
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in VERBS:
        command = importlib.import_module(f"stepsnet.commands.{name}")
        sub = verbs.add_parser(name, help=command.HELP, description=command.HELP)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_arguments(sub)
        sub.set_defaults(verb=command.run, parser=sub)
    return parser
