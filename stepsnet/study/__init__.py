"""A study: a question put to several models, its settings, splits and criteria declared before anything is trained.

``declare`` reads a declaration and reports its mistakes, ``run_plan`` decides what to run next, ``conductor`` runs it,
``record`` keeps a small JSON file per run, ``results`` reads and checks these, ``verdict`` judges, ``render`` and
``leaderboard`` present the outcome in words and figures, and ``pages`` writes the files.
"""

from .conductor import conduct
from .declare import Study, find_study, studies
from .pages import write_study
from .render import render_study
from .results import read_results

__all__ = ["Study", "conduct", "find_study", "read_results", "render_study", "studies", "write_study"]
