"""What a task says of a run's model to those who use it without stepsnet: names, input size, preprocessing, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Deployment"]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a model is called and what its outputs mean."""

    task: str
    input: str = "images"  # the name of the only input
    outputs: tuple[str, ...] = ("logits",)  # () where their number is not known before the model is called
    shape: tuple[int, ...]  # of one sample: (C, H, W), or (N,) tokens
    preprocessing: dict[str, Any]  # in timm's words for images
    classes: Sequence[str] | None = None  # in the order of the outputs; None where nobody has named them
    text: str | None = None  # the tokenizer of a language model, as its library's JSON
