"""Use a run: the classes of pictures, what is found in them and where, or a text that goes on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from .errors import UserError
from .models.build import build_model
from .run import recipe_of, trained_model
from .tasks.classification import Classification
from .tasks.image_data import read_to_predict
from .tasks.setup import set_up
from .tasks.text_data import END_OF_TEXT, load_tokenizer

__all__ = ["DRAWN", "classify", "draw", "write"]

# the tasks whose results are pictures, and who draws them
DRAWN = {"detection": "detection_pictures", "segmentation": "segmentation_pictures"}


@torch.no_grad()
def classify(folder: Path, files: Sequence[Path], top: int = 5) -> list[tuple[Path, list[tuple[str, float]]]]:
    """The likeliest classes of each picture, with probabilities.

    Raises:
        UserError: a file that is missing or no picture; it is named, and nothing is predicted.
    """
    recipe = recipe_of(folder)
    if recipe.task != "classification":
        raise UserError(f"predict: {folder} is a run of {recipe.task}, expected one of classification for pictures")
    setup = set_up(recipe, run=folder)
    assert isinstance(setup.task, Classification)
    images = setup.task.data
    model, device = trained_model(folder, recipe, setup.model)

    def read(file: Path) -> Tensor:
        with Image.open(file) as picture:
            return images.read(picture)

    inputs = read_to_predict(files, read)
    probabilities = torch.cat([model(x[None].to(device)).softmax(-1) for x in inputs])  # (files, classes)
    ranked = probabilities.topk(min(top, len(images.classes)))
    return [
        (file, [(images.classes[i], p) for p, i in zip(values.tolist(), indices.tolist())])
        for file, values, indices in zip(files, ranked.values, ranked.indices)
    ]


def draw(folder: Path, files: Sequence[Path], out: Path, least: float = 0.5) -> tuple[list[dict[str, Any]], list[str]]:
    """Write in ``out`` a picture of what is found in each file, and all of it as JSON.

    Args:
        least: score from which an object is drawn.

    Returns:
        The records of the JSON, and a line for each file.

    Raises:
        UserError: a run of another task, or a file that is missing or no picture.
    """
    recipe = recipe_of(folder)
    if recipe.task not in DRAWN:
        raise UserError(f"predict: {folder} is a run of {recipe.task}, expected one of {', '.join(DRAWN)} to draw")
    model, device = trained_model(folder, recipe, build_model(recipe.model))
    pictures = importlib.import_module(f"stepsnet.tasks.{DRAWN[recipe.task]}")
    return pictures.draw(recipe, model, device, folder, files, out, least)


def write(
    folder: Path, prompt: str, emit: Callable[[str], None], tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> None:
    """Hand ``emit`` the prompt and what a language model goes on with, piece by piece as it is generated.

    Args:
        tokens: how many are generated at most; the end of a text ends it earlier.
        temperature: 0 takes the likeliest token each time.

    Raises:
        UserError: the run is of another task, or the prompt does not fit into the model's context.
    """
    recipe = recipe_of(folder)
    if recipe.task != "language":
        raise UserError(f"predict: {folder} is a run of {recipe.task}, expected one of language for --prompt")
    if tokens < 1 or temperature < 0:
        wanted = "at least 1 token and a temperature of at least 0"
        raise UserError(f"predict: got {tokens} tokens and temperature {temperature}, expected {wanted}")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    model, device = trained_model(folder, recipe, build_model(recipe.model))
    config: Any = model.config
    if tokenizer.get_vocab_size() > config.vocab_size:
        got, most = tokenizer.get_vocab_size(), config.vocab_size
        raise UserError(f"tokenizer: {folder} has one of {got} tokens, expected at most the model's {most}")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError(f"--prompt: got {prompt!r}, expected some text")
    if len(ids) + tokens > config.max_position_embeddings:
        raise UserError(
            f"predict: got a prompt of {len(ids)} tokens and {tokens} to write, expected at most "
            f"{config.max_position_embeddings} together, the model's context"
        )
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    given = torch.tensor([ids], device=device)
    torch.manual_seed(seed)
    cast(Any, model).generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        streamer=_Pieces(tokenizer, prompt, emit),
        **sampling,
    )


class _Pieces:
    """transformers' streamer: the prompt comes first, then each token, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, emit: Callable[[str], None]):
        self.tokenizer, self.prompt, self.emit = tokenizer, prompt, emit
        self.stream: DecodeStream | None = None

    def put(self, ids: Tensor) -> None:
        if self.stream is None:
            self.stream = DecodeStream(skip_special_tokens=True)
            self.emit(self.prompt)
        elif piece := self.stream.step(self.tokenizer, int(ids)):
            self.emit(piece)

    def end(self) -> None:
        """Nothing is held back."""
