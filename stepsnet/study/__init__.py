"""A study: a question put to several models, its settings, splits and criteria declared before anything is trained.

``declare`` reads a declaration and says its mistakes, ``plan`` what is to be run next, ``conductor`` runs it,
``results`` keeps a small JSON a run, ``verdict`` judges and ``render`` writes and draws.
"""

from .conductor import conduct
from .declare import Study, find_study, studies
from .render import render_study, write_study
from .results import read_results

__all__ = ["Study", "conduct", "find_study", "read_results", "render_study", "studies", "write_study"]
