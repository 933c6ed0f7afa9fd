"""The mean and standard deviation that turn pixels into inputs, and warnings about weights to start from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
from timm.data import resolve_data_config

from ..errors import UserError
from ..run_folder.folder import on_unfinished, read_run_recipe
from . import normalization_of_run

__all__ = ["Normalization", "on_weights"]


class Normalization(NamedTuple):
    """The mean and standard deviation of each channel, for pixels in 0 … 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def in_greyscale(self) -> Normalization:
        """The normalization of a single channel: the mean over the colors."""
        return Normalization(*((sum(values) / len(values),) for values in self))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in self)
        return f"mean ({mean}) and std ({std})"


def on_weights(source: str, key: str, own: Normalization | None) -> list[str]:
    """Lines that warn of weights from an unfinished run, or of weights trained with another normalization than ``own``.

    Normalizations are compared only if both are known.

    Args:
        source: the folder of a run, a file, or ``timm:NAME``.
        key: the recipe's key, for messages.
    """
    lines = list[str]()
    if Path(source).is_dir():
        with suppress(UserError):  # a folder with nothing but weights
            lines += [f"{key}: {line}" for line in on_unfinished(Path(source))]
    given = _seen_by(source) if own else None
    if own and given and not _are_close(given, own):
        lines.append(
            f"{key}: the weights of {source} were trained on images normalized with {given}, but this run uses {own}: "
            "the same picture is a different input to them"
        )
    return lines


def _seen_by(source: str) -> Normalization | None:
    if source.startswith("timm:"):
        config = timm.get_pretrained_cfg(source.removeprefix("timm:"))
        if config is None:
            return None
        found = resolve_data_config(pretrained_cfg=config.to_dict())
        return Normalization(tuple(found["mean"]), tuple(found["std"]))
    if Path(source).is_dir():
        with suppress(UserError):  # what these weights have seen is not known
            return normalization_of_run(read_run_recipe(Path(source)))
    return None


def _are_close(given: Normalization, own: Normalization) -> bool:
    """Whether two normalizations agree, also if only one of them is in greyscale."""
    if len(given.mean) != len(own.mean):
        given, own = given.in_greyscale(), own.in_greyscale()
    return bool(np.allclose(given, own, rtol=0, atol=1e-4))
