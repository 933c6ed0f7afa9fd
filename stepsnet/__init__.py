"""Step by Step Network: very deep residual networks in steps of increasing width.

Importing this package registers the vision models with timm and the language model with transformers' Auto
classes. It does so when these are imported (at once, if they are already), and torch is loaded with the first
name that needs it, so that the command line answers quickly.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from .api import compare, load, train
    from .errors import UserError
    from .models import baseline_of, load_baseline
    from .models.steps_transformer import StepsTransformerConfig, StepsTransformerForCausalLM
    from .plan import StepPlan, plan_steps
    from .runs.results import Comparison, Run
    from .steps import ReverseStepsNet, StepsNet
    from .tasks import register_task
    from .tasks.classification.sources import register_source

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "ReverseStepsNet",
    "Run",
    "StepPlan",
    "StepsNet",
    "StepsTransformerConfig",
    "StepsTransformerForCausalLM",
    "UserError",
    "baseline_of",
    "compare",
    "load",
    "load_baseline",
    "plan_steps",
    "register_source",
    "register_task",
    "train",
]

_HOMES = {
    "Comparison": "runs.results",
    "ReverseStepsNet": "steps",
    "Run": "runs.results",
    "StepPlan": "plan",
    "StepsNet": "steps",
    "StepsTransformerConfig": "models.steps_transformer",
    "StepsTransformerForCausalLM": "models.steps_transformer",
    "UserError": "errors",
    "baseline_of": "models",
    "compare": "api",
    "load": "api",
    "load_baseline": "models",
    "plan_steps": "plan",
    "register_source": "tasks.classification.sources",
    "register_task": "tasks",
    "train": "api",
}


def _register_vision(timm) -> None:
    importlib.import_module("stepsnet.models")


def _register_language(auto) -> None:
    """AutoConfig alone needs it, and so do the models; where these are being imported, wait until they are."""
    if auto.__name__ == _AUTO_MODELS or _AUTO_MODELS not in sys.modules:
        importlib.import_module("stepsnet.models.steps_transformer")


_AUTO_MODELS = "transformers.models.auto.modeling_auto"
wrapt.register_post_import_hook(_register_vision, "timm")
wrapt.register_post_import_hook(_register_language, "transformers.models.auto.configuration_auto")
wrapt.register_post_import_hook(_register_language, _AUTO_MODELS)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"stepsnet.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'stepsnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
