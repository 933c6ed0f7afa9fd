"""A study: a question put to several models, its settings, splits and criteria declared before anything is trained.

``declare`` reads a declaration and says its mistakes, ``run_plan`` what is to be run next, ``conductor`` runs it,
``record`` keeps a small JSON of each run, ``results`` reads and checks them, ``verdict`` judges, ``render`` and
``leaderboard`` tell it in words and pictures, and ``pages`` writes them.
"""

from .conductor import conduct
from .declare import Study, find_study, studies
from .pages import write_study
from .render import render_study
from .results import read_results

__all__ = ["Study", "conduct", "find_study", "read_results", "render_study", "studies", "write_study"]
