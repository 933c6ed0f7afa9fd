"""What `stepsnet predict` asks of a task, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load_into
from ..config import Recipe
from ..engine.distributed import pick_device
from ..errors import UserError
from ..run_folder import read_weights

__all__ = ["PredictInputs", "Prediction", "load_trained"]


@dataclass(frozen=True, kw_only=True)
class PredictInputs:
    """What a user gives; each task takes the part that means something to it."""

    files: Sequence[Path] = ()
    prompt: str | None = None
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0 takes the likeliest token each time
    seed: int = 0
    top: int = 5  # classes per image
    out: Path = Path("predictions")  # for images that are drawn
    min_score: float = 0.5  # from which an object is drawn
    emit: Callable[[str], None] = lambda text: None  # is given a text piece by piece, as it is generated

    def require_files(self, run: Path, recipe: Recipe) -> Sequence[Path]:
        """Raises UserError where a text is given instead."""
        if self.prompt is not None:
            raise UserError(f"predict: {run} is a run of {recipe.task}, expected one of language for --prompt")
        return self.files


@dataclass(frozen=True)
class Prediction:
    """For one input: a line for people, and the same as JSON."""

    line: str
    record: Any


def load_trained(run: Path, recipe: Recipe, model: nn.Module) -> tuple[nn.Module, torch.device]:
    """A run's model with its weights, on its device and in evaluation mode.

    Raises:
        UserError: the run has no weights, or they do not fit the model.
    """
    load_into(model, read_weights(run))
    device = pick_device(recipe.device)
    return model.to(device).eval(), device
