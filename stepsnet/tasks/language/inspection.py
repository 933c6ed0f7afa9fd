"""What a report shows of a language model: how it continues the text that it was validated on from fixed places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ...models.build import context_of
from ...run_folder.inspection import Section, Text, Texts
from .generation import generate

__all__ = ["continued"]

_PROMPT, _NEW = 64, 160  # tokens, at most
_TEMPERATURE, _SEED = 0.8, 0


def continued(
    model: Any, tokenizer: Tokenizer, tokens: np.ndarray, seq_len: int, device: torch.device
) -> list[Section]:
    """Continuations of a text from its beginning and its middle; nothing if it is shorter than two prompts.

    The same seed and prompts give every model the same chances.
    """
    size = min(_PROMPT, seq_len // 2)
    context = context_of(model)
    new = _NEW if context is None else min(_NEW, context - size)
    starts = [0, len(tokens) // 2]
    if size < 1 or new < 1 or len(tokens) < 2 * size:
        return []
    prompts = np.stack([tokens[start : start + size] for start in starts]).astype(np.int64)
    found = generate(model, torch.from_numpy(prompts).to(device), tokenizer, new, _TEMPERATURE, _SEED)  # (2, …)
    texts = [
        Text(
            tokenizer.decode(prompt.tolist()),
            tokenizer.decode(generated.tolist()),
            tokenizer.decode(tokens[start + size : start + size + new].tolist()),
        )
        for prompt, generated, start in zip(prompts, found[:, size:].cpu(), starts)
    ]
    about = (
        f"The prompts are {size} tokens from the beginning and from the middle of the evaluated text. The model goes "
        f"on for up to {new} tokens, drawn at temperature {_TEMPERATURE} with seed {_SEED}."
    )
    return [Texts("How the text goes on", about, texts)]
