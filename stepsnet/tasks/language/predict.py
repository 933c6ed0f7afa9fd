"""A text that a language model goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from ...config import LanguageRecipe
from ...errors import UserError
from ...models.build import build_model
from ..prediction import PredictInputs, Prediction, load_trained
from .data import END_OF_TEXT, load_tokenizer

__all__ = ["predict"]


def predict(run: Path, recipe: LanguageRecipe, inputs: PredictInputs) -> list[Prediction]:
    """Generate a continuation of the prompt; ``inputs.emit`` gets the prompt and then each piece as it comes.

    Raises:
        UserError: there is no prompt, or it does not fit into the model's context.
    """
    if inputs.prompt is None:
        wanted = "expected one of classification, detection or segmentation for images"
        raise UserError(f"predict: {run} is a run of language, {wanted}")
    tokens, temperature = inputs.max_new_tokens, inputs.temperature
    if tokens < 1 or temperature < 0:
        wanted = "at least 1 token and a temperature of at least 0"
        raise UserError(f"predict: got {tokens} tokens and temperature {temperature}, expected {wanted}")
    tokenizer = load_tokenizer(run / "tokenizer.json")
    model, device = load_trained(run, recipe, build_model(recipe.model))
    config: Any = model.config
    if tokenizer.get_vocab_size() > config.vocab_size:
        got, most = tokenizer.get_vocab_size(), config.vocab_size
        raise UserError(f"tokenizer: {run} has one of {got} tokens, expected at most the model's {most}")
    ids = tokenizer.encode(inputs.prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError(f"--prompt: got {inputs.prompt!r}, expected some text")
    if len(ids) + tokens > config.max_position_embeddings:
        raise UserError(
            f"predict: got a prompt of {len(ids)} tokens and {tokens} to generate, expected at most "
            f"{config.max_position_embeddings} together, the model's context"
        )
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    given = torch.tensor([ids], device=device)
    torch.manual_seed(inputs.seed)
    pieces = _Pieces(tokenizer, inputs)
    cast(Any, model).generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        streamer=pieces,
        **sampling,
    )
    inputs.emit("\n")
    return [Prediction("", {"prompt": inputs.prompt, "text": pieces.text})]


class _Pieces:
    """transformers' streamer: the prompt comes first, then each token, which may be a part of a character.

    Not transformers' TextStreamer, which decodes with spaces cleaned up and holds a word back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, inputs: PredictInputs):
        self.tokenizer, self.inputs, self.text = tokenizer, inputs, ""
        self.stream: DecodeStream | None = None

    def put(self, ids: Tensor) -> None:
        if self.stream is None:
            self.stream = DecodeStream(skip_special_tokens=True)
            self.add(self.inputs.prompt or "")
        elif piece := self.stream.step(self.tokenizer, int(ids)):
            self.add(piece)

    def add(self, piece: str) -> None:
        self.text += piece
        self.inputs.emit(piece)

    def end(self) -> None:
        """Nothing is held back."""
