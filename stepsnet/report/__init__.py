"""Figures, and the HTML page of a run or of a comparison."""

from .page import write_report
from .runs import find_runs

__all__ = ["find_runs", "write_report"]
