"""A trained network as the first step of a wider StepsNet.

convert.py has :func:`stepsnet.grow` and says why the network's function is kept; plan.py chooses the new steps;
of_timm.py and of_transformers.py widen the models of each library, with start values from new_weights.py; spec.py is
the model of a recipe that grows from a run.
"""

from typing import Any

from torch import nn

from .convert import grow

__all__ = ["create", "grow"]


def create(**kwargs: Any) -> nn.Module:
    """:func:`grow` for a :class:`.ModelSpec`: ``{"name": "grow", "args": {"model": RUN, …}}``."""
    from .spec import create  # it reads runs and recipes, which grow itself does not need

    return create(**kwargs)
