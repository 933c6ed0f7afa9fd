"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["markdown_table"]

_RULES = {"l": "---", "r": "---:"}


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], align: str) -> str:
    """A table in Markdown, without a newline at its end.

    Args:
        headers: the text of each column's head; may be empty.
        rows: the cells of each row, written by ``str``.
        align: a letter for each column, "l" (left) or "r" (right), such as "lrr".

    Raises:
        ValueError: a row or ``align`` has another number of columns than ``headers``.
    """
    lines = [_line(headers), "|" + "|".join(_RULES[letter] for letter in align) + "|"]
    for row in [align, *(rows := list(rows))]:
        if len(row) != len(headers):
            raise ValueError(f"table: got {len(row)} columns in {row!r}, expected {len(headers)}")
    return "\n".join(lines + [_line(row) for row in rows])


def _line(cells: Sequence[Any]) -> str:
    return "|" + "|".join(f" {cell} " if str(cell) else " " for cell in cells) + "|"
