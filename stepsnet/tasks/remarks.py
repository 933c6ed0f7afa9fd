"""What a user should know of the data before the training, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from timm.utils import natural_key

from .class_names import CLASSES_FILE

__all__ = ["on_classes", "on_largest_class", "on_order", "on_scored"]

_SHARE = 0.5  # of the training images, above which a class is named
_NAMES = 3  # of classes in a line, at most


def on_classes(what: str, classes: Sequence[str], trained: np.ndarray, evaluated: np.ndarray) -> list[str]:
    """Classes of which nothing is trained on, or nothing evaluated.

    Args:
        what: is counted, such as "images".
        trained, evaluated: how many there are of each class.
    """
    lines = []
    if (never := (trained == 0) & (evaluated == 0)).any():
        lines.append(f"no {what} of {_names(classes, never)} at all, for which the model has an output")
    if (unseen := (trained == 0) & (evaluated > 0)).any():
        count = evaluated[unseen].sum()
        lines.append(f"no training {what} of {_names(classes, unseen)}, of which {count} are evaluated")
    if (unscored := (trained > 0) & (evaluated == 0)).any():
        lines.append(f"no evaluated {what} of {_names(classes, unscored)}: the metrics are of the other classes")
    return lines


def on_largest_class(classes: Sequence[str], trained: np.ndarray, evaluated: np.ndarray) -> list[str]:
    """A class that most training images are of, and the accuracy of answering it always."""
    largest, total = int(trained.argmax()), trained.sum()
    if len(classes) < 2 or trained[largest] <= _SHARE * total:
        return []
    share, guessed = 100 * trained[largest] / total, 100 * evaluated[largest] / evaluated.sum()
    return [
        f"{share:.1f}% of the training images are of {classes[largest]}: "
        f"to answer this always scores {guessed:.1f}% top-1 on the evaluated images"
    ]


def on_order(source: str | Path, key: str, classes: Sequence[str]) -> list[str]:
    """That the outputs of a file may be of other classes than is assumed: timm orders the same folders in its own way.

    Nothing where both orders agree. The weights of a run have the names of their classes beside them.

    Args:
        key: of the recipe, for messages.
        classes: the names of the folders, in our order.
    """
    if not Path(source).is_file() or (Path(source).parent / CLASSES_FILE).exists():
        return []
    try:
        of_timm = sorted(classes, key=natural_key)
    except ValueError:  # a digit that is no number, such as ², ends timm's training too
        return []
    pairs = enumerate(zip(classes, of_timm))
    return [
        f"{key}: {source} does not name its classes: its output {number} is taken for {ours}; if timm's train.py has "
        f"trained it on these folders, this is {theirs} and others differ too, since timm orders numbers by their "
        "value and ignores case"
        for number, (ours, theirs) in pairs
        if ours != theirs
    ][:1]


def on_scored(what: str, classes: Sequence[str], evaluated: np.ndarray, scored: np.ndarray) -> str:
    """That the metrics are of some of the evaluated samples, and which classes none of these is of."""
    lost = (evaluated > 0) & (scored == 0)
    none_of = f", none of them of {_names(classes, lost)}" if lost.any() else ""
    return f"the metrics are of {scored.sum()} of the {evaluated.sum()} {what} to evaluate{none_of}"


def _names(classes: Sequence[str], chosen: np.ndarray) -> str:
    names = [name for name, is_chosen in zip(classes, chosen) if is_chosen]
    more = f" and {len(names) - _NAMES} more classes" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
