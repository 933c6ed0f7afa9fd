"""What a task tells those who use a run's model without stepsnet: names, input size, preprocessing, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Deployment", "of_tokens"]

_TOKENS = 64  # in each sample that a language model is tried with


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a model is called and what its outputs mean."""

    task: str
    input: str = "images"  # the name of the only input
    dtype: str = "float32"  # of the input
    axes: tuple[str, ...] = ("batch", "channels", "height", "width")  # of the input
    outputs: tuple[str, ...] = ("logits",)  # () if their number is not known before the model is called
    shape: tuple[int, ...]  # of one sample: (C, H, W), or (N,) tokens
    preprocessing: dict[str, Any]  # for images, in timm's terms
    classes: Sequence[str] | None = None  # in the order of the outputs; None if they have no names
    tokenizer: str | None = None  # of a language model, as the tokenizers library writes it


def of_tokens(model: Any, tokenizer: str | None = None) -> Deployment:
    """How a language model is called."""
    from ..models.build import context_of

    context = context_of(model)
    tokens = _TOKENS if context is None else min(_TOKENS, context)
    return Deployment(
        task="language",
        input="input_ids",
        dtype="int64",
        axes=("batch", "tokens"),
        shape=(tokens,),
        preprocessing={} if context is None else {"max_tokens": context},
        tokenizer=tokenizer,
    )
