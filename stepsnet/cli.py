"""The command line: verbs to functions, and nothing else. Each verb is a file of commands/."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .errors import exit_status

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
    "models",
    "recipes",
    "plan",
    "table",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 130 or 143 for a signal."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"got {' '.join(rest)}, expected none of it")
    if rest:
        options.overrides += rest  # argparse takes no positional arguments after an option's
    return exit_status(lambda: options.verb(options), options.debug)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stepsnet", description="Step by Step Network: very deep networks that train.")
    parser.add_argument("--version", action="version", version=f"stepsnet {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in VERBS:
        command = importlib.import_module(f"stepsnet.commands.{name}")
        sub = verbs.add_parser(name, help=command.HELP, description=command.HELP)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_arguments(sub)
        sub.set_defaults(verb=command.run)
    return parser
