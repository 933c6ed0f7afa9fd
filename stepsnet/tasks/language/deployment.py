"""A language model for those who do not have stepsnet."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...config import LanguageRecipe
from ..deployment import Deployment, of_tokens
from .data import load_tokenizer

__all__ = ["deployment"]


def deployment(run: Path, recipe: LanguageRecipe, model: nn.Module) -> Deployment:
    """Raises UserError where the run has no tokenizer."""
    return of_tokens(model, load_tokenizer(run / "tokenizer.json").to_str())
