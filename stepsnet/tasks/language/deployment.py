"""A language model for use without stepsnet."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...run_folder.folder import asset
from ...settings.config import LanguageRecipe
from ..deployment import Deployment, of_tokens
from .data import load_tokenizer

__all__ = ["deployment"]


def deployment(run: Path, recipe: LanguageRecipe, model: nn.Module) -> Deployment:
    """How to use the model without stepsnet. Raises UserError if the run has no tokenizer."""
    return of_tokens(model, load_tokenizer(asset(run, "tokenizer.json")).to_str())
