"""The page that a training, a comparison or a sweep ends with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UserError
from ..files.own_files import NotOurFile
from ..report import write_report

__all__ = ["report_or_tell", "where_to_look"]


def report_or_tell(runs: Sequence[Path], page: Path, title: str, note: Callable[[str], None]) -> None:
    """Write the page of runs. If it cannot be written, only ``note`` is told: the runs are complete without it.

    A user's own file in its place is kept.
    """
    try:
        write_report(runs, page, title)
    except NotOurFile as error:
        note(f"no report: {error}")
    except UserError as error:
        again = f"stepsnet report {shlex.quote(str(page.parent))} --out FILE.html"
        note(f"no report: {error}; what was trained is kept, and `{again}` writes the report")


def where_to_look(folder: Path) -> str:
    """Name the page of a folder of runs, or the folder itself if the page could not be written, as on a full disk."""
    page = folder / "report.html"
    return f"report: {page}" if page.exists() else f"runs: {folder}"
