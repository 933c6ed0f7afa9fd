"""How a trained language model continues prompts: a function of the prompts, the temperature and the seed."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from ...engine.randomness import keep_random_states
from .data import END_OF_TEXT

__all__ = ["generate"]


def generate(
    model: Any, prompts: Tensor, tokenizer: Tokenizer, tokens: int, temperature: float, seed: int, streamer: Any = None
) -> Tensor:
    """Return prompts (B, N) with up to ``tokens`` more after each; random states stay as they were.

    Args:
        temperature: 0 takes the likeliest token each time.
        streamer: one of transformers' streamers, which gets each token as soon as it is generated.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    options: dict[str, Any] = {}
    if temperature:
        options |= {"do_sample": True, "temperature": float(temperature), "top_k": 0}  # the library takes no integer
    with keep_random_states(prompts.device):
        if not _returns_a_cache(model, prompts[:, :1]):
            options |= {"use_cache": False}  # else the library passes only the last token, as if there were a cache
        torch.manual_seed(seed)
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            eos_token_id=end,
            pad_token_id=end,
            streamer=streamer,
            **options,
        )


@torch.no_grad()
def _returns_a_cache(model: Any, tokens: Tensor) -> bool:
    """Whether a model called with tokens (B, 1) returns a cache; a user's own model may not."""
    output = model(input_ids=tokens, use_cache=True)
    return any(getattr(output, name, None) is not None for name in ALL_CACHE_NAMES)
