"""The class names of a run, in its folder: a run is used where its data are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..files import write_atomically

__all__ = ["CLASSES_FILE", "read_classes", "save_classes"]

CLASSES_FILE = "classes.json"


def save_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the class names as a JSON list, in the order of the model's outputs."""
    write_atomically(folder / CLASSES_FILE, json.dumps(classes, indent=1) + "\n")


def read_classes(run: Path) -> list[str]:
    """Raises UserError where the file is missing, or is not a list of names."""
    file = run / CLASSES_FILE
    try:
        classes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"run: cannot read {file}: {' '.join(str(error).split())}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"run: got {str(classes)[:80]} in {file}, expected a list of class names")
    return classes
