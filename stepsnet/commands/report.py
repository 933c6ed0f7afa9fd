"""`stepsnet report`: one HTML page for any runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..terminal import counted, say

HELP = "write one HTML page for any runs, finished or not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or that of a comparison")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument("--title", help="default: the names of the recipes")
    parser.add_argument("--force", action="store_true", help="replace files that no report has written")


def _import_modules_of(runs: Sequence[Path]) -> None:
    """They may register metrics; where they are not found any more, the report leaves these metrics out."""
    from ..errors import UserError
    from ..reading import read_yaml
    from ..user_modules import import_user_modules

    for config in (run / "config.yaml" for run in runs):
        with suppress(UserError):  # which the report itself finds, where it is one of the file
            values = read_yaml(config, "run")
            import_user_modules(values.get("import") or (), values.get("import_from"))


def run(options: argparse.Namespace) -> None:
    from ..report import write_report
    from ..run_folder import find_runs

    runs = find_runs(options.runs)
    _import_modules_of(runs)
    write_report(runs, options.out, options.title, options.force)
    say(f"report: {options.out} — {counted(len(runs), 'run')}")
