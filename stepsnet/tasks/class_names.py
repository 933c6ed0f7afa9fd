"""A run's class names, kept in its folder so that the run can be used without its data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..files.reading import read_json
from ..files.writing import write_atomically
from ..run_folder.folder import asset

__all__ = ["CLASSES_FILE", "check_classes", "distinct", "read_classes", "save_classes"]

CLASSES_FILE = "classes.json"


def distinct(classes: Sequence[str]) -> list[str]:
    """The names, with the class's number appended to a name that several classes share: ImageNet has two cranes."""
    times, found = Counter(classes), []
    taken = {name for name, count in times.items() if count == 1}
    for number, name in enumerate(classes):
        if times[name] > 1:
            while (name := f"{name} ({number})") in taken:
                pass
            taken.add(name)
        found.append(name)
    return found


def save_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the class names as a JSON list, in the order of the model's outputs.

    Raises:
        UserError: the folder has other names, because the data of a resumed run have changed.
    """
    check_classes(folder, classes)
    write_atomically(folder / CLASSES_FILE, json.dumps(classes, indent=1) + "\n")


def check_classes(run: Path, classes: Sequence[str]) -> None:
    """Raises UserError if a run has class names and they are not these in this order."""
    if not asset(run, CLASSES_FILE).exists() or list(classes) == (known := read_classes(run)):
        return
    if len(known) != len(classes):
        raise UserError(f"data: got {len(classes)} classes, expected the {len(known)} that {run} was trained on")
    number = next(number for number, (ours, theirs) in enumerate(zip(classes, known)) if ours != theirs)
    raise UserError(
        f"data: got {classes[number]!r} as class {number}, expected {known[number]!r} as in {run}; with other classes "
        "or another order its scores would be wrong"
    )


def read_classes(run: Path) -> list[str]:
    """The class names, made distinct. Raises UserError if the file is missing or is not a list of names."""
    file = asset(run, CLASSES_FILE)
    classes = read_json(file, "run")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"run: got {str(classes)[:80]} in {file}, expected a list of class names")
    return distinct(classes)
