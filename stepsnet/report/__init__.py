"""Figures, and the HTML page of a run or of a comparison."""

from .page import write_report

__all__ = ["write_report"]
