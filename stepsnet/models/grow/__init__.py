"""A trained network as the first step of a wider StepsNet.

convert.py is :func:`stepsnet.grow`, and says why the function stays; plan.py chooses the new steps, of_timm.py and
of_transformers.py widen the models of either library, with what new_weights.py draws; spec.py is the model of a recipe
that grows from a run.
"""

from typing import Any

from torch import nn

from .convert import grow

__all__ = ["create", "grow"]


def create(**kwargs: Any) -> nn.Module:
    """:func:`grow` for a :class:`~stepsnet.config.ModelSpec`: ``{"name": "grow", "args": {"model": RUN, …}}``."""
    from .spec import create  # it reads runs and recipes, which the function does not need

    return create(**kwargs)
