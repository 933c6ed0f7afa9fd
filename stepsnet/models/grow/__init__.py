"""A trained network as the first step of a wider StepsNet.

convert.py is :func:`stepsnet.grow`, and says why the function stays; plan.py chooses the new steps, of_timm.py and
of_transformers.py widen the models of either library, spec.py is the model of a recipe that grows from a run.
"""

from .convert import create, grow

__all__ = ["create", "grow"]
