"""The page that a training, a comparison or a sweep ends with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..own_files import NotOurFile
from ..report import write_report

__all__ = ["report_or_tell"]


def report_or_tell(runs: Sequence[Path], page: Path, title: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Write the page of runs; a file of the user's in its place stays there, and ``tell`` gets a note of it."""
    try:
        write_report(runs, page, title)
    except NotOurFile as error:
        tell({"kind": "note", "text": f"no report: {error}"})
