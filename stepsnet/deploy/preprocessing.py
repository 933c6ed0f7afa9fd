"""How pictures become a model's inputs, as far as is known: the channels, their mean and deviation, the crop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from torch import nn

from ..errors import UserError
from ..models.backbone import mean_and_std_of
from ..tasks.images import mode_of
from ..tasks.normalization import Normalization

__all__ = ["channels_of", "of_model", "stated", "unknown"]

_KEYS = ("interpolation", "mean", "std", "crop_pct", "crop_mode")


def of_model(model: nn.Module, channels: int, tag: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The preprocessing that timm's config states, for inputs of ``channels``, and lines about what it leaves open.

    Args:
        tag: timm's name for weights, such as ``resnet50.a1_in1k``, whose config replaces the model's own.
    """
    config = dict(resolve_model_data_config(model))
    if tag is not None and (found := timm.get_pretrained_cfg(tag)) is not None:
        config = resolve_data_config(pretrained_cfg=found.to_dict())
    elif backbone := getattr(model, "backbone_name", None):  # a segmenter has it, which timm does not know
        config["mean"], config["std"] = mean_and_std_of(backbone)
    mean, std = tuple(config["mean"]), tuple(config["std"])
    notes: list[str] = []
    if channels == 1:
        mean, std = Normalization(mean, std).in_greyscale()
    elif len(mean) != channels:
        config |= {"mean": None, "std": None}
        notes = [f"the mean and std of {channels} channels are not known: they are null in the metadata"]
        return {"mode": mode_of(channels), **config}, notes
    return {"mode": mode_of(channels), **config, "mean": mean, "std": std}, notes


def unknown(channels: int) -> dict[str, Any]:
    """The preprocessing of a module that states nothing."""
    return {"mode": mode_of(channels), **dict.fromkeys(_KEYS)}


def channels_of(model: nn.Module, size: Sequence[int]) -> int:
    """How many channels a model takes: those of ``size`` (C, H, W), or, if only those work, its first convolution's."""
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    modules = dict(model.named_modules())
    found = modules.get(first) if isinstance(first, str) else None
    if not isinstance(found, nn.Conv2d):
        found = next((module for module in modules.values() if isinstance(module, nn.Conv2d)), None)
    if found is None or found.in_channels == size[0]:
        return size[0]
    for channels in (size[0], found.in_channels):  # a stem may rearrange space to channels in front of the convolution
        try:
            with torch.inference_mode():
                model(torch.zeros(1, channels, *size[1:]))
        except Exception:  # each model says in its own way what it takes
            continue
        return channels
    return size[0]


def stated(
    shape: Sequence[int],
    input_size: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of an input, and what a caller states of the preprocessing.

    Raises:
        UserError: a size that is not three whole numbers, or a mean or std that is not one valid number per channel.
    """
    if input_size is not None:
        sides = _entries(input_size)
        if len(sides) != 3 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise UserError(f"input_size: got {input_size!r}, expected three whole numbers: channels, height, width")
        shape = sides
    found: dict[str, Any] = {}
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            continue
        entries, least = _entries(values), -math.inf if name == "mean" else 0.0
        are_numbers = all(isinstance(one, Real) and least < float(one) < math.inf for one in entries)
        if len(entries) != shape[0] or not are_numbers:
            raise UserError(f"{name}: got {values!r}, expected {shape[0]} numbers, one for each channel")
        if any(one > 1 for one in entries):
            raise UserError(f"{name}: got {values!r}, expected that of pixels from 0 to 1, not from 0 to 255")
        found[name] = tuple(entries)
    return tuple(shape), found


def _entries(values: Any) -> list[Any]:
    """The entries of an iterable; none for anything else."""
    return list(values) if isinstance(values, Iterable) else []
