"""What a run records about itself: lines of metrics, names of checkpoints, and a summary once it has ended."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.reading import read_json, read_text
from ..files.writing import SUMS

__all__ = [
    "LABEL",
    "checkpoint_folders",
    "diverged_at",
    "is_checkpoint",
    "metrics_text",
    "parse_metrics",
    "read_label",
    "read_metrics",
    "read_summary",
    "step_of",
]

LABEL = "label.txt"  # what the model of a run among others is called in reports

_CHECKPOINT = re.compile(r"\.?step-\d{8,}")

# optional keys of summary.json: their type, and what messages call it
_IN_SUMMARY: dict[str, tuple[Any, str]] = {
    "metrics": (dict, "a mapping of names to numbers"),
    "seed": (int, "a whole number"),
    "epochs": (int, "a whole number"),
    "label": (str, "text"),
    "widths": (list, "a list of widths"),
    "blocks": (int | None, "a whole number"),
    "hardware": (dict | None, "a mapping"),
    "versions": (dict | None, "a mapping"),
    "trained_before": (list, "a list of mappings"),
}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, without those that no run has written."""
    return [line for text in metrics_text(folder / "metrics.jsonl") if (line := parse_metrics(text)) is not None]


def diverged_at(folder: Path) -> int | None:
    """The update at which a run met a number that is not finite; None if it has ended well or is still going on."""
    lines = metrics_text(folder / "metrics.jsonl")
    last = parse_metrics(lines[-1]) if lines else None
    return last["step"] if last and last["kind"] == "diverged" else None


def read_label(folder: Path) -> str:
    """The label that a run among others was started with; nothing if it was started alone."""
    file = folder / LABEL
    return read_text(file, "run").strip() if file.exists() else ""


def metrics_text(path: Path) -> list[str]:
    """The lines of a log as they are."""
    return path.read_bytes().decode("utf-8", "replace").splitlines() if path.is_file() else []


def parse_metrics(text: str) -> dict[str, Any] | None:
    """A line of a log; None for what no run has written, such as half a line."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("kind"), str)
    return line if whole else None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; None if the run has not ended. Raises UserError if the file is damaged."""
    file = folder / "summary.json"
    if not file.exists():
        return None
    summary = read_json(file, "run", dict, allow_nan=True)
    for key, (kind, expected) in _IN_SUMMARY.items():
        if key in summary and not isinstance(summary[key], kind):
            raise UserError(f"run: {file}: got {key} {str(summary[key])[:40]!r}, expected {expected}")
    for key, value in summary.get("metrics", {}).items():
        if not isinstance(value, int | float | None):
            raise UserError(f"run: {file}: got {key} {str(value)[:40]!r}, expected a number")
    return summary


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints, the latest first. One under its temporary name is among them once it has its checksums.

    A copy under another name is not.
    """
    found = [path for path in folder.glob("*step-*") if is_checkpoint(path)]
    whole = [path for path in found if not path.name.startswith(".") or (path / SUMS).exists()]
    return sorted(whole, key=lambda path: (step_of(path), path.name), reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return bool(_CHECKPOINT.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The update after which a checkpoint was written."""
    return int(path.name.rpartition("-")[2])
