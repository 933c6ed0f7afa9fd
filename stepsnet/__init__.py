"""Step by Step Network: very deep residual networks in steps of increasing width.

Importing this package registers the vision models with timm. It does so when timm itself is imported
(at once, if it is already), and torch is loaded with the first name that needs it, so that the command
line answers quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from .models import baseline_of, load_baseline
    from .plan import StepPlan, plan_steps
    from .steps import ReverseStepsNet, StepsNet

__version__ = "0.1.0"
__all__ = ["ReverseStepsNet", "StepPlan", "StepsNet", "baseline_of", "load_baseline", "plan_steps"]

_HOMES = {
    "ReverseStepsNet": "steps",
    "StepPlan": "plan",
    "StepsNet": "steps",
    "baseline_of": "models",
    "load_baseline": "models",
    "plan_steps": "plan",
}

wrapt.register_post_import_hook(lambda timm: importlib.import_module("stepsnet.models"), "timm")


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"stepsnet.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'stepsnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
