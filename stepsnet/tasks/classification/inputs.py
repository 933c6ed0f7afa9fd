"""How images become a classifier's inputs."""

from __future__ import annotations

from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from ...errors import UserError
from ...settings.config import ClassificationRecipe
from ...settings.from_data import key_of_model
from ..normalization import Normalization
from ..splits import split_of
from .digits import data_config as data_config_of_digits
from .input_size import input_size
from .transforms import InputSpec

__all__ = ["data_config", "input_spec", "normalization_of"]


def input_spec(recipe: ClassificationRecipe, model: nn.Module) -> InputSpec:
    """How images become this model's inputs: timm's data config, at the recipe's input size or else the model's own.

    The recipe's crop takes precedence; :func:`resolve` takes its mode from that config when a run starts.

    Raises:
        UserError: the model's inputs have neither one channel nor three.
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
    crop_mode = recipe.crop_mode or "center"  # older runs, which do not record it, were scored like this
    return InputSpec(size, tuple(mean), tuple(std), config["interpolation"], crop_pct, crop_mode)


def data_config(recipe: ClassificationRecipe, model: nn.Module) -> dict[str, Any]:
    """How images become inputs in evaluation, in timm's terms."""
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
    """The normalization of the model's inputs. Raises UserError as :func:`input_spec` does."""
    config = data_config(recipe, model)
    return Normalization(tuple(config["mean"]), tuple(config["std"]))
