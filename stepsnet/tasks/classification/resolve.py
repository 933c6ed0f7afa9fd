"""What a classifier's data decide if its recipe leaves it open: classes, channels, size of the input."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import timm
import torch
from timm.data import resolve_model_data_config

from ...errors import UserError
from ...models.build import build_model
from ...settings.config import ClassificationRecipe
from ...settings.from_data import given_args, key_of_model, with_args, with_classes
from ..images import UnreadableImage, shape_of
from .data import StoredData
from .input_size import check_input_size, fit_input_size
from .sources import StoredImages

__all__ = ["resolve", "with_crop_mode"]

_LOOKED_AT = 256  # training images, evenly spaced


def resolve(recipe: ClassificationRecipe, opened: StoredData) -> tuple[ClassificationRecipe, list[str]]:
    """The recipe with what its data decide, and a line for each decision and for what seems to be a mistake.

    ``num_classes`` is open if it is not given, and so is ``in_chans`` then. A model whose classes are given is taken as
    it is: the config of any version's run replays that run, except that early versions took no crop from the model.

    Raises:
        UserError: the images decide the size and are not squares of one size, or the model does not accept the size.
    """
    recipe, lines = with_classes(recipe, len(opened.splits.classes))
    args, look = given_args(recipe.model), _look_at(opened.splits.train)
    own_channels = _channels_of(recipe.model.name)
    if lines and "in_chans" not in args and look.channels not in (None, own_channels):
        args["in_chans"] = look.channels
        what = "greyscale" if look.channels == 1 else "not all greyscale"
        lines.append(f"in_chans {look.channels}, from the data: {look} are {what}")
    if look.channels == 1 and args.get("in_chans", own_channels) == 3:
        key = f"{key_of_model(recipe)}.args.in_chans"
        lines.append(f"{look} are greyscale, and {recipe.model.name} reads them in color: {key}=1 reads one channel")
    recipe = with_args(recipe, args)
    if recipe.img_size == "data" and "img_size" not in args:
        side = look.side()
        recipe, of_model = with_crop_mode(fit_input_size(recipe, side), opened)
        decided = f"img_size {side}, from the data"
        # the model's own crop_pct would enlarge the images and cut off their borders
        if recipe.crop_pct is None and opened.name != "digits":
            recipe, decided = replace(recipe, crop_pct=1.0), f"{decided}, whose images are evaluated whole (crop_pct 1)"
        return recipe, [*lines, decided, *of_model]
    given = recipe.img_size
    if given == "data":
        recipe = with_args(recipe, args, img_size=None)
    elif given and "img_size" not in args:
        recipe = fit_input_size(recipe, given)
    elif given:
        with torch.device("meta"):
            check_input_size(recipe, given, build_model(recipe.model, pretrained=False))
    recipe, of_model = with_crop_mode(recipe, opened)
    return recipe, [*lines, *of_model]


def with_crop_mode(recipe: ClassificationRecipe, opened: StoredData) -> tuple[ClassificationRecipe, list[str]]:
    """The recipe with its model's crop mode, and a line about it, unless that is center, as in runs without one."""
    if recipe.crop_mode or opened.name == "digits":
        return recipe, []
    with suppress(UserError), torch.device("meta"):  # what cannot be built there is reported when it is built for real
        mode = resolve_model_data_config(build_model(recipe.model, pretrained=False))["crop_mode"]
        if mode != "center":
            line = f"crop_mode {mode}, from {recipe.model.name}, decides how images that are not square are evaluated"
            return replace(recipe, crop_mode=mode), [line]
    return recipe, []


def _channels_of(name: str) -> int:
    """The channels that a model has unless its arguments say otherwise."""
    config = None
    with suppress(RuntimeError):  # timm has no such weights, which building the model reports
        config = timm.get_pretrained_cfg(name)
    return config.input_size[0] if config and config.input_size else 3


@dataclass(frozen=True)
class _Look:
    """What training images have in common, as far as they were looked at."""

    count: int
    channels: int | None  # 1 if all of them are stored in greyscale, else 3; None if that is not known
    sizes: tuple[tuple[int, int], ...]  # (height, width), without repetitions

    def __str__(self) -> str:
        return f"the {self.count} training images that were looked at"

    def side(self) -> int:
        """The side of the images. Raises UserError if they are not squares of one size."""
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
    total, shapes = len(images.labels), list[tuple[int, int, int]]()
    shape = getattr(images, "shape", None) or (lambda index: shape_of(images.read(index)))
    for index in np.unique(np.linspace(0, total - 1, min(total, _LOOKED_AT)).round().astype(int)):
        with suppress(UnreadableImage):
            shapes.append(shape(int(index)))
    channels = max((channels for channels, _, _ in shapes), default=3) if hasattr(images, "shape") else None
    return _Look(len(shapes), channels, tuple({(height, width) for _, height, width in shapes}))
