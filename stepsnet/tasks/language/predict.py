"""The continuation of a prompt by a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, TextStreamer

from ...errors import UserError
from ...models.build import context_of
from ...run_folder.folder import asset
from ...settings.config import LanguageRecipe
from ..prediction import PredictInputs, Prediction
from .data import UNKNOWN, load_tokenizer
from .generation import generate

__all__ = ["predict"]


def predict(run: Path, recipe: LanguageRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Continue the prompt; ``inputs.emit`` is called with the prompt and then with each word as it is generated.

    Raises:
        UserError: there is no prompt, it is not text, or it does not fit into the model's context.
    """
    if inputs.prompt is None:
        expected = "expected --prompt TEXT, or for images a run of classification, detection or segmentation"
        raise UserError(f"predict: {run} is a run of language, {expected}")
    if inputs.out is not None:
        raise UserError(f"--out: got {inputs.out} with a prompt, expected it only with images: text is printed")
    tokens = inputs.max_new_tokens
    try:
        inputs.prompt.encode()
    except UnicodeEncodeError:  # bytes on the command line that are not text
        raise UserError(f"--prompt: got {inputs.prompt!r}, expected text in UTF-8") from None
    tokenizer = load_tokenizer(asset(run, "tokenizer.json"))
    model, device = inputs.model_of(run, recipe)
    config: Any = model.config
    if tokenizer.get_vocab_size() > config.vocab_size:
        got, most = tokenizer.get_vocab_size(), config.vocab_size
        raise UserError(f"tokenizer: got {got} tokens in that of {run}, expected at most the model's {most}")
    ids = tokenizer.encode(inputs.prompt, add_special_tokens=False).ids
    if (unknown := tokenizer.token_to_id(UNKNOWN)) in ids and unknown is not None:
        letters = "".join(sorted({c for c in inputs.prompt if tokenizer.token_to_id(c) is None}))
        raise UserError(
            f"--prompt: got the characters {letters[:40]!r}, for which {run} has no tokens, expected text without them"
        )
    if not ids:
        raise UserError(f"--prompt: got {inputs.prompt!r}, expected some text")
    context = context_of(model)
    if context is not None and len(ids) + tokens > context:
        raise UserError(
            f"predict: got a prompt of {len(ids)} tokens and {tokens} to generate, expected at most "
            f"{context} together, the model's context"
        )
    prompt = torch.tensor([ids], device=device)  # (1, tokens)
    streamer = _Streamer(tokenizer, inputs)
    generate(model, prompt, tokenizer, tokens, inputs.temperature, inputs.seed, streamer)
    inputs.emit("\n")
    return [Prediction("", {"prompt": inputs.prompt, "text": streamer.text})]


class _Streamer(TextStreamer):
    """Emits the prompt as it was given, and then each word once it is complete.

    A word may be several tokens, and a token may be a part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, inputs: PredictInputs):
        decoding = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=tokenizer), skip_prompt=True, **decoding)
        self.emit, self.text = inputs.emit, ""
        self.on_finalized_text(inputs.prompt or "")

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        if text:
            self.emit(text)
