"""The example with which :func:`stepsnet.stepify` calls a model on the meta device, to find its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...macs import OF_MODULES, count_on_meta, on_meta
from ..blocks import is_of_transformers

__all__ = ["Example", "check_example", "example_of"]


@dataclass(frozen=True)
class Example:
    """What a model is called with, on the meta device.

    Args:
        given: args and kwargs with their values, if the user gave them.
    """

    args: tuple[Any, ...] = ()
    kwargs: Any = None
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @torch.no_grad()
    def run(self, model: nn.Module) -> Any:
        """The outputs of a model on the meta device."""
        return model(*self.args, **(self.kwargs or {}))

    def macs(self, model: nn.Module) -> int:
        return count_on_meta(on_meta(model), *self.args, **(self.kwargs or {}))[0]


def check_example(example: Any) -> None:
    """Raises UserError unless it is None or a batch: a tensor with a dimension, or arguments with such tensors."""
    if example is None or (isinstance(example, Tensor) and example.dim() > 0):
        return
    values = (
        [*example.values()] if isinstance(example, Mapping) else example if isinstance(example, list | tuple) else []
    )
    if not any(isinstance(value, Tensor) and value.dim() > 0 for value in values):
        raise UserError(
            f"example: got {type(example).__name__}, expected a batch: a tensor of at least one dimension, or a list "
            "or mapping of the model's arguments with such tensors"
        )
    if isinstance(example, Mapping) and not all(isinstance(name, str) for name in example):
        raise UserError(
            "example: got a mapping with keys that are not strings, expected the names of the model's arguments"
        )


def example_of(model: nn.Module, given: Any = None) -> Example:
    """What a model is called with, on the meta device. Raises UserError if it is not known.

    A given example is reduced to one sample if its first dimension counts samples.
    """
    if given is not None:
        args = () if isinstance(given, Mapping) else tuple(given) if isinstance(given, list | tuple) else (given,)
        kwargs = dict(given) if isinstance(given, Mapping) else {}
        return _one_sample(model, args, kwargs) or _on_meta(args, kwargs)
    from timm.data import resolve_model_data_config

    patches = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    built_for, reads = getattr(patches, "img_size", None), getattr(getattr(patches, "proj", None), "in_channels", None)
    if hasattr(model, "pretrained_cfg"):
        chans, height, width = resolve_model_data_config(model)["input_size"]
    elif built_for and reads:  # a model of timm that its create_model did not make
        chans = reads
    else:
        raise UserError(
            f"stepify: {type(model).__name__} is not a timm model, expected "
            f"{_inside(model)}example=, a batch that it takes"
        )
    if built_for:
        height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    size = 1, getattr(model, "in_chans", chans), height, width
    return Example((torch.empty(size, device="meta", dtype=next(model.parameters()).dtype),))


def _on_meta(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None = None) -> Example:
    """A given example on the meta device, or only the first ``rows`` of each of its tensors."""

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value[:rows] if value.dim() else value).to("meta")

    return Example(
        tuple(map(there, args)), {key: there(value) for key, value in kwargs.items()} or None, (args, kwargs)
    )


def _one_sample(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example | None:
    """The first row of each tensor; None if it is not a sample by itself.

    It is not if the tensors have different numbers of rows, like the nodes and edges of a graph, or if the rows cost
    more together than one by one, like the time steps of a sequence that attend to each other.
    """
    lengths = {len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()}
    whole, one = _on_meta(args, kwargs), _on_meta(args, kwargs, 1)
    if lengths == {1}:
        return one
    try:
        return one if len(lengths) == 1 and whole.macs(model) <= min(lengths) * one.macs(model) else None
    except OF_MODULES:  # it does not take one row; or not the whole either, which is refused later
        return None


def _inside(model: nn.Module) -> str:
    """For a model that wraps one that needs no example, how to reach the inner one; else ""."""
    for path, module in model.named_modules():
        if path and (_is_of_a_family(module) or hasattr(module, "pretrained_cfg")):
            return f"the model inside of it, model.get_submodule({path!r}), or "
    return ""


def _is_of_a_family(model: Any) -> bool:
    if not is_of_transformers(model):
        return False
    from ..transformers_families import FAMILIES

    return model.config.model_type in FAMILIES
