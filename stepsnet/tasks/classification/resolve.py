"""What the data of a classifier decide where its recipe leaves it open: classes, channels, size of the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...config import ClassificationRecipe
from ...errors import UserError
from ...from_data import given_args, key_of_model, with_args, with_classes
from ...models.build import build_model
from ..images import UnreadableImage, shape_of
from .data import StoredData
from .input_size import check_input_size, fit_input_size
from .sources import StoredImages

__all__ = ["resolve"]

_LOOKED_AT = 256  # training images, evenly spaced


def resolve(recipe: ClassificationRecipe, opened: StoredData) -> tuple[ClassificationRecipe, list[str]]:
    """The recipe with what its data decide, and a line for each decision, and for one that seems to be a mistake.

    ``num_classes`` is open where it is not given, and then ``in_chans`` too. A model whose classes are given is taken
    as it is: the config of any version's run replays that run.

    Raises:
        UserError: images of several sizes, or of one that the model does not accept, where they decide the size.
    """
    recipe, lines = with_classes(recipe, len(opened.splits.classes))
    args, look = given_args(recipe.model), _look_at(opened.splits.train)
    if lines and look.are_greyscale and "in_chans" not in args:
        args["in_chans"] = 1
        lines.append(f"in_chans 1, from the data: {look} are greyscale")
    if look.are_greyscale and args.get("in_chans", 3) == 3:
        key = f"{key_of_model(recipe)}.args.in_chans"
        lines.append(f"{look} are greyscale, and {recipe.model.name} reads them in color: {key}=1 reads one channel")
    recipe = with_args(recipe, args)
    if recipe.img_size == "data" and "img_size" not in args:
        side = look.side()
        return fit_input_size(recipe, side), [*lines, f"img_size {side}, from the data"]
    if recipe.img_size == "data":
        recipe = with_args(recipe, args, img_size=None)
    elif recipe.img_size and "img_size" not in args:
        recipe = fit_input_size(recipe, recipe.img_size)
    elif recipe.img_size:
        with torch.device("meta"):
            check_input_size(recipe, build_model(recipe.model))
    return recipe, lines


@dataclass(frozen=True)
class _Look:
    """What training images have in common, as far as they were looked at."""

    count: int
    channels: frozenset[int]
    sizes: tuple[tuple[int, int], ...]  # (height, width), without repetitions

    def __str__(self) -> str:
        return f"the {self.count} training images that were looked at"

    @property
    def are_greyscale(self) -> bool:
        return self.channels == {1}

    def side(self) -> int:
        """The side of the squares that all of them are. Raises UserError where they are not."""
        if not self.sizes:
            raise UserError(
                "img_size: got data, but none of the training images can be read, expected a side in pixels"
            )
        (height, width), *others = sorted(self.sizes)
        if not others and height == width:
            return height
        got = f"{height}×{width}"
        if others:
            got = f"{len(self.sizes)} sizes, from {got} to {'×'.join(map(str, max(self.sizes)))}"
        raise UserError(
            f"img_size: got data, but {self} are {'of ' * bool(others)}{got} pixels, expected squares of one size; "
            "a side such as img_size=64 resizes and crops them"
        )


def _look_at(images: StoredImages) -> _Look:
    total, shapes = len(images.labels), set[tuple[int, int, int]]()
    count = 0
    for index in np.unique(np.linspace(0, total - 1, min(total, _LOOKED_AT)).round().astype(int)):
        try:
            shapes.add(_shape(images, int(index)))
        except UnreadableImage:
            continue
        count += 1
    return _Look(count, frozenset(shape[0] for shape in shapes), tuple({shape[1:] for shape in shapes}))


def _shape(images: Any, index: int) -> tuple[int, int, int]:
    if hasattr(images, "shape"):
        return images.shape(index)
    return shape_of(images.read(index))  # as it is read, in color
