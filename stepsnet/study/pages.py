"""The pages of a study's folder: what has ended as text, as data, as a leaderboard and as a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..own_files import write_own_files
from ..report.figure import csv_of, figure_files
from .declare import Study
from .leaderboard import leaderboard
from .render import draw_study, render_study, rows_of
from .run_plan import progress
from .verdict import judge_study

__all__ = ["write_study"]


def write_study(study: Study, results: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """Write ``study.md``, ``study.json``, ``leaderboard.md`` and, once a final run has ended, a figure and its CSV.

    Returns:
        The text of ``study.md``.

    Raises:
        NotOurFile: one of them would replace somebody else's file; nothing is written then.
    """
    text, rows = render_study(study, results), rows_of(study, results)
    there, all_of = progress(study, results)
    judged = judge_study(study, results).as_dict()
    content = {"study": study.name, "runs": there, "of": all_of, "cells": rows, **judged}
    pages = {
        "study.md": (text + "\n").encode(),
        "study.json": (json.dumps(content, indent=1) + "\n").encode(),
        "leaderboard.md": (leaderboard(study, results) + "\n").encode(),
    }
    figure = draw_study(study, results)
    if figure is not None:
        table = csv_of([{key: value for key, value in row.items() if key != "tried"} for row in rows])
        pages |= {**figure_files(figure, "study"), "study.csv": table.encode()}
    write_own_files(folder, pages)
    return text
