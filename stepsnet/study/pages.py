"""The pages of a study's folder: what has ended as text, as data, as a leaderboard and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.own_files import NotOurFile, write_own_files
from ..files.reading import read_json, read_yaml
from ..files.writing import dump_json
from ..report.figure import csv_of, figure_files
from ..run_folder.folder import RECIPES_FOLDER
from .declare import Study
from .leaderboard import leaderboard
from .render import draw_study, render_study, rows_of
from .run_plan import progress
from .verdict import judge_study

__all__ = ["check_folder", "write_study"]


def check_folder(study: Study, folder: Path) -> None:
    """Raises UserError if a folder has runs or pages of another study, whose runs may have the same names."""
    if (other := _study_of(folder)) not in ("", study.name):
        raise NotOurFile(f"--run: {folder} has runs of {other}, expected a folder for {study.name}")


def _study_of(folder: Path) -> str:
    """The name of the study whose runs or pages a folder has; "" if it has none."""
    with suppress(UserError, AttributeError):  # a damaged file says nothing, and is read again where it is needed
        if configs := sorted((folder / RECIPES_FOLDER).glob("*.yaml")):
            return str(read_yaml(configs[0], "recipe").get("name")).rpartition("/")[0]
        if (page := folder / "study.json").exists():
            return str(read_json(page, "study").get("study", ""))
    return ""


def write_study(study: Study, results: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """Write ``study.md``, ``study.json``, ``leaderboard.md`` and, once a final run has ended, a figure and its CSV.

    Returns:
        The text of ``study.md``.

    Raises:
        NotOurFile: one of them would replace somebody else's file, or another study's; nothing is written then.
    """
    check_folder(study, folder)
    data = sorted({str(record["data"]) for record in results.values() if "data" in record})
    head = f"# {study.name}\n\n{study.question}" + (f"\n\nTrained on {', '.join(data)}." if data else "")
    text, rows = f"{head}\n\n{render_study(study, results)}", rows_of(study, results)
    there, all_of = progress(study, results)
    judged = judge_study(study, results).as_dict()
    content = {"study": study.name, "runs": there, "of": all_of, "cells": rows, **judged}
    pages = {
        "study.md": (text + "\n").encode(),
        "study.json": (dump_json(content, indent=1) + "\n").encode(),
        "leaderboard.md": (leaderboard(study, results) + "\n").encode(),
    }
    figure = draw_study(study, results)
    if figure is not None:
        table = csv_of([{key: value for key, value in row.items() if key != "tried"} for row in rows])
        pages |= {**figure_files(figure, "study"), "study.csv": table.encode()}
    write_own_files(folder, pages)
    return text
