"""How a trained language model goes on with prompts: a function of the prompts, the temperature and the seed."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engine.randomness import keep_random_states
from .data import END_OF_TEXT

__all__ = ["generate"]


def generate(
    model: Any, prompts: Tensor, tokenizer: Tokenizer, tokens: int, temperature: float, seed: int, streamer: Any = None
) -> Tensor:
    """Prompts (B, N) and up to ``tokens`` more behind each; random states stay what they are.

    Args:
        temperature: 0 takes the likeliest token each time.
        streamer: of transformers, is given each token when it is there.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    with keep_random_states(prompts.device):
        torch.manual_seed(seed)
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            eos_token_id=end,
            pad_token_id=end,
            streamer=streamer,
            **sampling,
        )
