"""Use a run: the classes of pictures or of their pixels, or a text that goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from .errors import UserError
from .files import write_atomically
from .models.build import build_model
from .models.upernet import UPerNet
from .recipes.recipe import SegmentationRecipe
from .run import recipe_of, trained_model
from .segments import colour_of, draw_segments, list_segments
from .tasks.classification import Classification
from .tasks.image_data import UNREADABLE
from .tasks.segmentation import classes_of, inference_of
from .tasks.setup import set_up
from .tasks.text_data import END_OF_TEXT, load_tokenizer

__all__ = ["classify", "segment", "write"]


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
    inputs = [images.read(_open_picture(file)) for file in files]
    probabilities = torch.cat([model(x[None].to(device)).softmax(-1) for x in inputs])  # (files, classes)
    ranked = probabilities.topk(min(top, len(images.classes)))
    return [
        (file, [(images.classes[i], p) for p, i in zip(values.tolist(), indices.tolist())])
        for file, values, indices in zip(files, ranked.values, ranked.indices)
    ]


@torch.no_grad()
def segment(folder: Path, files: Sequence[Path], out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Write each picture's classes into ``out``: NAME.segments.png, an overlay, and NAME.segments.json.

    Yields:
        Each file with what its JSON holds: the image, its segments in COCO's form, and the categories.

    Raises:
        UserError: a file that is missing or no picture, or two of one name; nothing is written then.
    """
    recipe = recipe_of(folder)
    assert isinstance(recipe, SegmentationRecipe)
    for file in files:
        _open_picture(file)
        if same := [other for other in files if other.stem == file.stem and other != file]:
            raise UserError(f"predict: got {file} and {same[0]}, expected names that differ: both go into {out}")
    classes, whole = classes_of(folder), build_model(recipe.model)
    assert isinstance(whole, UPerNet)
    inference = inference_of(recipe, whole)
    model, device = trained_model(folder, recipe, whole)
    for file in files:
        picture = _open_picture(file).convert("RGB")
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # (3, H, W)
        likeliest = inference(model, pixels.to(device)).max(0)
        labels, probabilities = likeliest.indices.cpu().numpy(), likeliest.values.exp().cpu().numpy()
        segments = list_segments(labels, probabilities, classes)
        image = io.BytesIO()
        draw_segments(picture, labels, segments, classes).save(image, format="PNG")
        found = {
            "image": {"file_name": file.name, "height": picture.height, "width": picture.width},
            "segments": segments,
            "categories": [{"id": i, "name": name, "color": colour_of(i)} for i, name in enumerate(classes)],
        }
        write_atomically(out / f"{file.stem}.segments.png", image.getvalue())
        write_atomically(out / f"{file.stem}.segments.json", json.dumps(found) + "\n")
        yield file, found


def _open_picture(file: Path) -> Image.Image:
    try:
        with Image.open(file) as picture:
            picture.load()
            return picture
    except UNREADABLE as error:
        reason = "no such file" if not file.exists() else str(error).split(":")[0]
        raise UserError(f"predict: cannot read {file} as a picture: {reason}") from None


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
