"""Step by Step Network: very deep residual networks in steps of increasing width.

Importing this package registers the vision models with timm, and the language model with transformers' Auto
classes, as soon as those libraries are imported (at once if they already are). torch is loaded with the first name
that needs it, so that the command line answers quickly.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from .analysis.stepify_report import describe_stepify
    from .api import compare, load, resume, train
    from .deploy.export import export
    from .errors import UserError
    from .models import baseline_of, load_baseline
    from .models.compress import Compressed, compress
    from .models.grow import grow
    from .models.optimize import optimize
    from .models.stepify import stepify
    from .models.stepify.adapters import register_block
    from .models.steps_transformer import StepsTransformerConfig, StepsTransformerForCausalLM
    from .plan import StepPlan, plan_steps
    from .residual.known_blocks import branches_of
    from .runs.results import Comparison, Run
    from .steps import ReverseStepsNet, StepsNet
    from .tasks import register_task
    from .tasks.classification.sources import register_source

__version__ = "0.1.0"
_HOMES = {
    "Comparison": "runs.results",
    "Compressed": "models.compress",
    "ReverseStepsNet": "steps",
    "Run": "runs.results",
    "StepPlan": "plan",
    "StepsNet": "steps",
    "StepsTransformerConfig": "models.steps_transformer",
    "StepsTransformerForCausalLM": "models.steps_transformer",
    "UserError": "errors",
    "baseline_of": "models",
    "branches_of": "residual.known_blocks",
    "compare": "api",
    "compress": "models.compress",
    "describe_stepify": "analysis.stepify_report",
    "export": "deploy.export",
    "grow": "models.grow",
    "load": "api",
    "load_baseline": "models",
    "optimize": "models.optimize",
    "plan_steps": "plan",
    "register_block": "models.stepify.adapters",
    "register_source": "tasks.classification.sources",
    "register_task": "tasks",
    "resume": "api",
    "stepify": "models.stepify",
    "train": "api",
}
__all__ = sorted(_HOMES)
_OLDEST_TRANSFORMERS = (5, 22)  # as in pyproject.toml


def _register_vision(timm) -> None:
    importlib.import_module("stepsnet.models")


def _register_language(auto) -> None:
    """Register when AutoConfig is first used: transformers' modules import each other, and half of one is of no use.

    A transformers older than the one that the extra asks for is left alone.
    """
    import re

    release = re.match(r"(\d+)\.(\d+)", getattr(sys.modules["transformers"], "__version__", ""))
    if release and tuple(map(int, release.groups())) < _OLDEST_TRANSFORMERS:
        return

    def with_ours(wrapped):
        @functools.wraps(wrapped)
        def after_registering(*args, **kwargs):
            importlib.import_module("stepsnet.models.steps_transformer")
            importlib.import_module("stepsnet.models.transformers_families")
            return wrapped(*args, **kwargs)

        return classmethod(after_registering)  # by its name, so that it can be pickled

    for name in ("for_model", "from_pretrained"):
        setattr(auto.AutoConfig, name, with_ours(vars(auto.AutoConfig)[name].__func__))


wrapt.register_post_import_hook(_register_vision, "timm")
wrapt.register_post_import_hook(_register_language, "transformers.models.auto.configuration_auto")


def __getattr__(name: str):
    if name == "residual":
        return importlib.import_module("stepsnet.residual")
    if name in _HOMES:
        from .errors import naming_extra

        with naming_extra():
            return getattr(importlib.import_module(f"stepsnet.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'stepsnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "residual"})
