"""What a user should know about the data before training, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from timm.utils import natural_key

from .class_names import CLASSES_FILE

__all__ = ["on_classes", "on_largest_class", "on_order", "on_scored"]

_SHARE = 0.5  # of the training images; a class with more than this is named
_NAMES = 3  # of classes listed in a line, at most


def on_classes(what: str, classes: Sequence[str], trained: np.ndarray, evaluated: np.ndarray) -> list[str]:
    """Lines about classes that are missing from the training data, from the evaluated data or from both.

    Args:
        what: what is counted, such as "images".
        trained, evaluated: the count for each class.
    """
    lines = []
    if (never := (trained == 0) & (evaluated == 0)).any():
        lines.append(f"no {what} of {_names(classes, never)} at all, though the model has an output for every class")
    if (unseen := (trained == 0) & (evaluated > 0)).any():
        count = evaluated[unseen].sum()
        lines.append(f"no training {what} of {_names(classes, unseen)}, but {count} to evaluate")
    if (unscored := (trained > 0) & (evaluated == 0)).any():
        lines.append(f"no evaluated {what} of {_names(classes, unscored)}: the metrics cover only the other classes")
    return lines


def on_largest_class(classes: Sequence[str], trained: np.ndarray, evaluated: np.ndarray) -> list[str]:
    """A line if most training images are of one class, with the accuracy of always answering that class."""
    largest, total = int(trained.argmax()), trained.sum()
    if len(classes) < 2 or trained[largest] <= _SHARE * total:
        return []
    share, guessed = 100 * trained[largest] / total, 100 * evaluated[largest] / evaluated.sum()
    return [
        f"{share:.1f}% of the training images are of {classes[largest]}: "
        f"always answering this scores {guessed:.1f}% top-1 on the evaluated images"
    ]


def on_order(source: str | Path, key: str, classes: Sequence[str]) -> list[str]:
    """A line if a file's outputs may stand for other classes than assumed: timm orders the same folders differently.

    There is none if both orders agree, or if the class names lie beside the file, as with the weights of a run.

    Args:
        key: the recipe's key, for messages.
        classes: the names of the folders, in our order.
    """
    if not Path(source).is_file() or (Path(source).parent / CLASSES_FILE).exists():
        return []
    try:
        of_timm = sorted(classes, key=natural_key)
    except ValueError:  # a digit that is not a number, such as ², stops timm's training too
        return []
    pairs = enumerate(zip(classes, of_timm))
    return [
        f"{key}: {source} does not name its classes: its output {number} is taken to be class {ours}; if timm's "
        f"train.py trained it on these folders, that output is class {theirs}, and others differ too, since timm sorts "
        "numbers by value and ignores case"
        for number, (ours, theirs) in pairs
        if ours != theirs
    ][:1]


def on_scored(what: str, classes: Sequence[str], evaluated: np.ndarray, scored: np.ndarray) -> str:
    """A line that says how many of the evaluated samples the metrics cover, and which classes they miss entirely."""
    lost = (evaluated > 0) & (scored == 0)
    none_of = f", none of them of {_names(classes, lost)}" if lost.any() else ""
    return f"the metrics cover {scored.sum()} of the {evaluated.sum()} {what} to evaluate{none_of}"


def _names(classes: Sequence[str], chosen: np.ndarray) -> str:
    names = [name for name, is_chosen in zip(classes, chosen) if is_chosen]
    more = f" and {len(names) - _NAMES} more classes" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
