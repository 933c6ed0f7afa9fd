"""How images become a classifier's inputs, and whether weights to start from have seen others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from torch import nn

from ...config import ClassificationRecipe
from ...errors import UserError
from ...from_data import key_of_model
from ...models.build import build_model
from ...run_folder import read_run_recipe
from ..splits import split_of
from .digits import data_config as data_config_of_digits
from .input_size import input_size
from .transforms import InputSpec

__all__ = ["Normalization", "data_config", "input_spec", "normalization_of", "on_other_normalization"]


class Normalization(NamedTuple):
    """Of each channel, for pixels in 0 … 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def in_greyscale(self) -> Normalization:
        """Of one channel, by the mean of the colors."""
        return Normalization(*((sum(values) / len(values),) for values in self))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in self)
        return f"mean ({mean}) and std ({std})"


def input_spec(recipe: ClassificationRecipe, model: nn.Module) -> InputSpec:
    """How images become this model's inputs: timm's data config, at the size that the model is built for.

    But for the recipe's crop, which :func:`resolve` takes from that config when a run starts.

    Raises:
        UserError: inputs of neither one channel nor three.
    """
    config = resolve_model_data_config(model)
    size = input_size(recipe, model)
    if size[0] not in (1, 3):
        key = f"{key_of_model(recipe)}.args.in_chans"
        raise UserError(f"{key}: got {size[0]}, expected 1 for greyscale images or 3 for color")
    mean, std = config["mean"], config["std"]
    if size[0] == 1:
        mean, std = Normalization(mean, std).in_greyscale()
    crop_pct = recipe.crop_pct or config["crop_pct"]
    crop_mode = recipe.crop_mode or "center"  # runs of before, which do not name it, were scored so
    return InputSpec(size, tuple(mean), tuple(std), config["interpolation"], crop_pct, crop_mode)


def data_config(recipe: ClassificationRecipe, model: nn.Module) -> dict[str, Any]:
    """How images become inputs in evaluation, in timm's words."""
    spec = input_spec(recipe, model)
    config = {
        "input_size": spec.input_size,
        "mean": spec.mean,
        "std": spec.std,
        "interpolation": spec.interpolation,
        "crop_pct": spec.crop_pct,
        "crop_mode": spec.crop_mode,
    }
    return config | data_config_of_digits() if split_of(recipe.data)[0] == "digits" else config


def normalization_of(recipe: ClassificationRecipe, model: nn.Module) -> Normalization:
    """Raises UserError as :func:`input_spec` does."""
    config = data_config(recipe, model)
    return Normalization(tuple(config["mean"]), tuple(config["std"]))


def on_other_normalization(source: str, key: str, own: Normalization) -> list[str]:
    """A line where the weights of ``source`` were trained on images with another normalization than ``own``.

    Of a file it is not known.

    Args:
        source: the folder of a run, a file, or ``timm:NAME``.
        key: of the recipe, for messages.
    """
    given = _seen_by(source)
    if given is None or _are_close(given, own):
        return []
    return [
        f"{key}: the weights of {source} were trained on images with {given}, those of this run have {own}: the same "
        "picture is another input to them"
    ]


def _seen_by(source: str) -> Normalization | None:
    if source.startswith("timm:"):
        config = timm.get_pretrained_cfg(source.removeprefix("timm:"))
        if config is None:
            return None
        found = resolve_data_config(pretrained_cfg=config.to_dict())
        return Normalization(tuple(found["mean"]), tuple(found["std"]))
    if Path(source).is_dir():
        with suppress(UserError), torch.device("meta"):  # weights of which nobody knows what they have seen
            recipe = read_run_recipe(Path(source))
            if isinstance(recipe, ClassificationRecipe):
                return normalization_of(recipe, build_model(recipe.model, pretrained=False))
    return None


def _are_close(given: Normalization, own: Normalization) -> bool:
    """Also of a model in greyscale."""
    if len(given.mean) != len(own.mean):
        given, own = given.in_greyscale(), own.in_greyscale()
    return bool(np.allclose(given, own, rtol=0, atol=1e-4))
