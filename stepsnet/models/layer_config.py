"""transformers configurations with the layers in steps: what a layer and a static cache read about their step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..files.writing import write_atomically
from ..plan import per_block

__all__ = ["InstalledCode", "LayerConfig", "PerLayer"]

_MODULE = "modeling_stepsnet"  # the module saved beside weights, for ``auto_map``


class LayerConfig:
    """A model's configuration with the sizes of one step; everything else is read from the model's own."""

    def __init__(self, config: Any, sizes: dict[str, Any]):
        self.model_config = config
        for name, value in sizes.items():
            setattr(self, name, value)
            setattr(self, config.attribute_map.get(name, name), value)  # GPT-2 has hidden_size as n_embd, too

    def __getattr__(self, name: str) -> Any:
        if name == "model_config" or name.startswith("__"):  # copy and pickle ask before it is set
            raise AttributeError(name)
        return getattr(self.model_config, name)


class InstalledCode:
    """A class whose code is the installed stepsnet's, even when it is loaded with ``trust_remote_code``."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "") -> None:
        """Do nothing: transformers would save a copy of this one module, without the package that it imports."""


class PerLayer(InstalledCode):
    """A mix-in that lets a configuration with ``steps`` and ``depths`` give transformers a view of itself per layer."""

    depths: Any
    auto_map: ClassVar[dict[str, str]] = {}  # trl reads it from every configuration that is not transformers' own

    def __setattr__(self, name: str, value: Any) -> None:
        """Let the number of layers follow new ``depths``, which AutoConfig's keyword may set later."""
        was = self.__dict__.get(name) if name == "depths" else None
        is_whole = isinstance(was, list) and getattr(self, "num_hidden_layers", None) == sum(was)
        super().__setattr__(name, value)
        if is_whole and isinstance(value, list | tuple):
            super().__setattr__("num_hidden_layers", sum(value))

    def let_others_find(self, **classes: str) -> None:
        """Let programs that do not import stepsnet load what is saved from now on, with ``trust_remote_code``.

        Args:
            **classes: names of classes in the configuration's own module, by the names of transformers' Auto classes.
        """
        self.auto_map = {auto: f"{_MODULE}.{name}" for auto, name in classes.items()}  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Also save the module that ``auto_map`` names, whose one line imports from the installed stepsnet."""
        found = [name.partition(".") for name in self.auto_map.values()]  # from a repository: USER/NAME--MODULE.CLASS
        if names := dict.fromkeys(name for module, _, name in found if module == _MODULE):
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            imported = f"from {type(self).__module__} import {', '.join(names)}  # noqa: F401\n"
            write_atomically(Path(save_directory) / f"{_MODULE}.py", imported)
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]

    @property
    def steps(self) -> Sequence[LayerConfig]:
        """A view of this configuration per step."""
        raise NotImplementedError

    @property
    def per_layer_config(self) -> list[LayerConfig]:
        """A view for each layer that runs, from which transformers takes the shapes of a cache."""
        return per_block(self.steps, self.depths or [])[: self.num_hidden_layers]  # type: ignore[attr-defined]

    @per_layer_config.setter
    def per_layer_config(self, value: Any) -> None:
        if value is not None:
            raise ValueError("per_layer_config: got a value, expected None: it follows from the steps")
