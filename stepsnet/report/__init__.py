"""Figures, and the HTML page of a run or of a comparison."""

from .load_runs import find_runs
from .page import write_report

__all__ = ["find_runs", "write_report"]
