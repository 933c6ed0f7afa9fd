"""`stepsnet report`: one HTML page for any runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..output.terminal import counted, say

HELP = "write one HTML page for any runs, finished or not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folders of runs, comparisons, sweeps or studies"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )
    parser.add_argument("--title", help="title of the page (default: the names of the recipes)")
    parser.add_argument("--force", action="store_true", help="replace files that no report has written")


def run(options: argparse.Namespace) -> None:
    from ..report import write_report
    from ..run_folder.folder import find_runs

    runs = find_runs(options.runs)
    write_report(runs, options.out, options.title, options.force)
    say(f"report: {options.out} — {counted(len(runs), 'run')}")
