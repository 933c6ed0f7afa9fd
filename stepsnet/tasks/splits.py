"""Which split of the data is evaluated, and a part of the training split that is held out for it.

``DATA@train``, ``DATA@val`` and ``DATA@test`` mean the same for every task that reads images: the samples that are
trained on, those that runs are validated on, and those that are scored at the end. With ``holdout`` a fixed part of
the training split is validated on, and the data's own validation split is left for ``DATA@test``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import UserError

__all__ = ["SPLITS", "hold_out", "require_split", "sources_of", "split_of"]

SPLITS = ("train", "val", "test")


def split_of(data: str) -> tuple[str, str]:
    """``DATA@test`` as its two parts; without an ``@`` the split is ``val``."""
    name, at, split = data.rpartition("@")
    return (name, split) if at and split in SPLITS else (data, "val")


def sources_of(holdout: int | None) -> dict[str, str]:
    """From which of the data's own splits the samples of each split are taken."""
    return {"train": "train", "val": "train", "test": "val"} if holdout else {name: name for name in SPLITS}


def require_split(data: str, split: str, known: Iterable[str]) -> None:
    """Raises UserError where the data have no such split."""
    known = list(known)
    if split not in known:
        held_out = "; a recipe with holdout leaves val for @test" if split == "test" else ""
        raise UserError(f"data: {data} has no split {split!r}, expected one of {', '.join(known)}{held_out}")


def hold_out(count: int, images: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the images that stay in the training split, and of ``count`` others, in order.

    This depends on the two numbers only, so it is the same for every run and seed.

    Raises:
        UserError: no image would be left in one of the parts.
    """
    from sklearn.model_selection import train_test_split

    if not 1 <= count < images:
        raise UserError(f"holdout: got {count}, expected 1 to {images - 1} of the {images} training images")
    kept, aside = train_test_split(np.arange(images), test_size=count, random_state=0)
    return np.sort(kept), np.sort(aside)
