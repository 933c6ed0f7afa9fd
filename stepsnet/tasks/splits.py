"""Which split of the data is evaluated, and which part of the training split is held out for validation.

``DATA@train``, ``DATA@val`` and ``DATA@test`` mean the same for every task: the samples that are trained on, those
that runs are validated on, and those that are scored at the end. With ``holdout`` a fixed part of the training split
is validated on, and the data's own validation split is left for ``DATA@test``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from ..settings.config import Recipe

__all__ = [
    "SPLITS",
    "check_holdout",
    "divided_for",
    "hold_out",
    "is_trained_on",
    "require_split",
    "sources_of",
    "split_of",
]

R = TypeVar("R", bound=Recipe)

SPLITS = ("train", "val", "test")


def split_of(data: str) -> tuple[str, str]:
    """``DATA@test`` as its two parts; without an ``@`` the split is ``val``."""
    name, at, split = data.rpartition("@")
    return (name, split) if at and split in SPLITS else (data, "val")


def sources_of(holdout: int | None) -> dict[str, str]:
    """From which of the data's own splits the samples of each split are taken."""
    return {"train": "train", "val": "train", "test": "val"} if holdout else {name: name for name in SPLITS}


def divided_for(recipe: R, data: str | None) -> tuple[R, list[str]]:
    """The recipe of a run that is evaluated on ``data``, and a line that says how the data are divided.

    Nothing was held out of the training split of other data, so ``DATA`` means their own validation split. Nor was the
    run trained on them, so they have no clean samples.
    """
    holdout = getattr(recipe, "holdout", None)
    trained_on, name = split_of(recipe.data)[0], split_of(data or recipe.data)[0]
    if not is_trained_on(recipe, data):
        said = f"{name} keeps its own splits: holdout {holdout} applies only to {trained_on}"
        named = {field.name for field in dataclasses.fields(recipe)}
        without: dict[str, Any] = {"holdout": None, "clean_samples": 0}
        recipe = dataclasses.replace(recipe, **{key: value for key, value in without.items() if key in named})
        return recipe, [] if holdout is None else [said]
    if holdout is None or name == trained_on:
        return recipe, []
    return recipe, [f"{name} is taken to be {trained_on} in a new place: holdout {holdout} applies to it too"]


def is_trained_on(recipe: Recipe, data: str | None) -> bool:
    """Whether ``data`` are the recipe's own; these may have moved, and are recognized by their name."""
    trained_on, name = split_of(recipe.data)[0], split_of(data or recipe.data)[0]
    return name == trained_on or _is_moved(trained_on, name)


def _is_moved(before: str, now: str) -> bool:
    """Whether these may name the same data: the same folder or file, or another with that name and kind."""
    (kind, place), (other_kind, other) = _kind_and_place(before), _kind_and_place(now)
    if kind and other_kind and kind != other_kind:
        return False
    if kind in ("cifar10", "cifar100"):  # there is only one of each
        return True
    on_hub = kind == "hfds" and not Path(place).is_absolute() and not Path(other).exists()
    return not on_hub and Path(place).resolve().name == Path(other).resolve().name


def _kind_and_place(data: str) -> tuple[str, str]:
    """``folder:PATH`` as its two parts; a path alone has no kind."""
    kind, colon, place = data.partition(":")
    return (kind, place) if colon and kind.isidentifier() else ("", data)


def check_holdout(holdout: float | None, data: object, has_test: bool) -> None:
    """Raises UserError if ``holdout`` would make a second test split."""
    if holdout is not None and has_test:
        raise UserError(f"holdout: got {holdout}, but {data} has a test split of its own, expected null")


def require_split(data: str, split: str, known: Iterable[str]) -> None:
    """Raises UserError if the data have no such split."""
    known = list(known)
    if split not in known:
        held_out = "; with holdout in the recipe, val becomes the test split" if split == "test" else ""
        raise UserError(f"data: {data} has no split {split!r}, expected one of {', '.join(known)}{held_out}")


def hold_out(count: int, images: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the images that stay in the training split, and of ``count`` held-out ones, both in order.

    The result depends only on these two numbers, so it is the same for every run and seed.

    Raises:
        UserError: no image would be left in one of the parts.
    """
    from sklearn.model_selection import train_test_split

    if not 1 <= count < images:
        raise UserError(f"holdout: got {count}, expected 1 to {images - 1} of the {images} training images")
    kept, aside = train_test_split(np.arange(images), test_size=count, random_state=0)
    return np.sort(kept), np.sort(aside)
