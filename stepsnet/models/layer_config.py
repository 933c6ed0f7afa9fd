"""Configurations of transformers with the layers in steps: what a layer, and a static cache, reads of its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .assembly import per_block

__all__ = ["LayerConfig", "PerLayer"]


class LayerConfig:
    """A model's configuration with the sizes of one step; all else is read from the model's."""

    def __init__(self, config: Any, sizes: dict[str, Any]):
        self.model_config = config
        for name, value in sizes.items():
            setattr(self, name, value)
            setattr(self, config.attribute_map.get(name, name), value)  # GPT-2 has hidden_size as n_embd too

    def __getattr__(self, name: str) -> Any:
        if name == "model_config" or name.startswith("__"):  # copy and pickle ask before it is set
            raise AttributeError(name)
        return getattr(self.model_config, name)


class PerLayer:
    """What a configuration with ``steps`` and ``depths`` gives transformers: a view of itself for each layer."""

    depths: Any
    auto_map: ClassVar[dict[str, str]] = {}  # which trl asks of every configuration that is not of transformers' own

    def __setattr__(self, name: str, value: Any) -> None:
        """Other ``depths``, such as AutoConfig's keyword sets on a configuration that is there, are so many layers."""
        was = self.__dict__.get(name) if name == "depths" else None
        is_whole = isinstance(was, list) and getattr(self, "num_hidden_layers", None) == sum(was)
        super().__setattr__(name, value)
        if is_whole and isinstance(value, list | tuple):
            super().__setattr__("num_hidden_layers", sum(value))

    @property
    def steps(self) -> Sequence[LayerConfig]:
        """A view of this configuration per step."""
        raise NotImplementedError

    @property
    def per_layer_config(self) -> list[LayerConfig]:
        """A view per layer, from which transformers takes the shapes of a static cache."""
        return per_block(self.steps, self.depths or [])

    @per_layer_config.setter
    def per_layer_config(self, value: Any) -> None:
        if value is not None:
            raise ValueError("per_layer_config: got a value, expected None: it follows from the steps")
