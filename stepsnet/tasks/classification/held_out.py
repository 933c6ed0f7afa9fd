"""How a data set is divided: samples to train on, samples to choose settings by, and samples to score at the end.

A source has two splits, the second of which runs are validated on, and perhaps a third for the end. Whoever chooses
settings by the second of only two has nothing left to report honestly: with ``holdout``, a fixed part of the training
split takes its place, and the second split is scored only as ``DATA@test``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ...errors import UserError
from ..images import UnreadableImage
from ..splits import check_holdout

__all__ = ["InMemory", "Parts", "divide"]


@dataclass(frozen=True)
class Parts:
    """Indices of samples: those to train on, some of them to score without augmentation, and those that are evaluated.

    The evaluated ones are in the source's training split (``of_training``), or else in its second or third split.
    """

    train: np.ndarray
    clean: np.ndarray
    evaluated: np.ndarray
    of_training: bool
    name: str  # of the evaluated split, for a summary


def divide(
    train_labels: Sequence[int],
    others: int,
    split: str,
    train_samples: int | None = None,
    holdout: int | None = None,
    clean_samples: int = 0,
    own_test: bool = False,
    for_training: bool = True,
) -> Parts:
    """Divide a source of two splits. The result depends only on the labels: it is the same for every run and seed.

    Args:
        train_labels: the labels of the training split.
        others: the number of samples in the second split, or in the source's own test split if that is evaluated.
        split: the one that is evaluated: train, val or test.
        train_samples: how many to train on, taken from each class in turn; None is all.
        holdout: how many training samples are ``val``, in the same proportion from each class; the second split is then
            ``test``.
        clean_samples: how many of those that are trained on are scored too.
        own_test: whether the source has a test split besides the two.
        for_training: False if ``train_samples`` and ``clean_samples`` may be more than there are.

    Raises:
        UserError: there are fewer samples than asked for, the test split is asked for but the second split is the one
            to validate on, or ``holdout`` is given and the source has a test split of its own.
    """
    check_holdout(holdout, "the data set", own_test)
    if split == "test" and holdout is None and not own_test:
        reason = "there is no test split besides the one to validate on"
        raise UserError(f"data: got @test, but {reason}; expected a recipe with holdout, or the data without @test")
    kept, aside = np.arange(len(train_labels)), np.arange(others)
    if holdout is not None and (len(train_labels) or split != "test"):
        kept, aside = _set_aside(np.asarray(train_labels), holdout)
    if not for_training and train_samples is not None:
        train_samples = min(train_samples, len(kept)) or None  # with no samples, there is nothing to leave out
    kept = _first_of_each(train_labels, kept, train_samples, "train_samples")
    clean_samples = clean_samples if for_training else min(clean_samples, len(kept))
    clean = _first_of_each(train_labels, kept, clean_samples, "clean_samples") if clean_samples else kept[:0]
    if split == "train":
        return Parts(kept, clean, kept, True, "train")
    if split == "val" and holdout is not None:
        return Parts(kept, clean, aside, True, f"{holdout} of train")
    return Parts(kept, clean, np.arange(others), False, split)


def _set_aside(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices to train on, and ``count`` others, stratified by class; a class with one image is only trained on."""
    from sklearn.model_selection import train_test_split

    found, of_image, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    classes, several = int(np.count_nonzero(sizes > 1)), np.flatnonzero(sizes[of_image] > 1)
    if not max(1, classes) <= count <= len(several) - classes:
        single, most = len(found) - classes, len(several) - classes
        images = f"{len(labels)} training images"
        images += f", of which {single} are the only ones of their class" if single else ""
        raise UserError(f"holdout: got {count}, expected {classes} to {most} of the {images}")
    _, aside = train_test_split(several, test_size=count, random_state=0, stratify=labels[several])
    aside = np.sort(aside)
    return np.setdiff1d(np.arange(len(labels)), aside), aside


def _first_of_each(labels: Sequence[int], among: np.ndarray, count: int | None, name: str) -> np.ndarray:
    """All indices of ``among``, or the first ``count`` if the classes take turns."""
    if count is None:
        return among
    if not 1 <= count <= len(among):
        raise UserError(f"{name}: got {count}, expected 1 to {len(among)}, the number of training images")
    classes = np.asarray(labels)[among]
    turn = np.empty(len(classes), dtype=np.int64)
    for label in np.unique(classes):
        turn[classes == label] = np.arange(np.count_nonzero(classes == label))
    return among[np.sort(np.lexsort((classes, turn))[:count])]


class InMemory:
    """The images at ``indices``, decoded once and kept as arrays of uint8; other images are read from the source.

    An image that cannot be decoded is not kept, so reading it raises the same error again.
    """

    def __init__(self, images: Any, indices: np.ndarray):
        self.images, self.labels, self.left_out = images, images.labels, getattr(images, "left_out", "")
        self.kept: dict[int, np.ndarray] = {}
        for index in map(int, indices):
            try:
                self.kept[index] = np.asarray(images.read(index))
            except UnreadableImage:
                continue

    def read(self, index: int) -> Image.Image:
        if index in self.kept:
            return Image.fromarray(self.kept[index])
        return self.images.read(index)

    def name(self, index: int) -> str:
        return self.images.name(index)
