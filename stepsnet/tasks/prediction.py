"""What `stepsnet predict` gives to a task and gets from it, and what the tasks' predictions share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import nn

from ..config import Recipe
from ..console import progress_bar
from ..device import pick_device_of_run
from ..errors import UserError
from ..models.optimize import optimize
from ..models.trained import trained_model
from .images import UnreadableImage
from .outputs import Outputs, common_folder

__all__ = ["File", "PredictInputs", "Prediction", "origin_of", "read_again", "read_files"]

T = TypeVar("T")
File = Path | Image.Image  # an image file, or an image in memory

# setting -> its option, and the task that takes it
_TAKEN_BY = {
    "top": ("--top", "classification"),
    "min_score": ("--least", "detection"),
    "max_new_tokens": ("--tokens", "language"),
    "temperature": ("--temperature", "language"),
    "seed": ("--seed", "language"),
}


@dataclass(frozen=True, kw_only=True)
class PredictInputs:
    """What a user gives; each task uses the fields that apply to it."""

    files: Sequence[File] = ()
    prompt: str | None = None
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0 takes the likeliest token each time
    seed: int = 0
    top: int = 5  # classes per image
    out: Path | None = None  # the folder for what is written
    drawings: Path = Path("predictions")  # the same where images are drawn and there is no other
    root: Path | None = None  # the folder that it mirrors; by default the one that all files have in common
    force: bool = False  # replace what others have written there
    writes: bool = True  # False: nothing is drawn and written
    min_score: float = 0.5  # objects with a lower score are not drawn
    emit: Callable[[str], None] = lambda text: None  # called with each piece of a text as it is generated
    model: nn.Module | None = None  # the run's, where it has been loaded already
    # told of a file that cannot be read, and why; True: the others are predicted, False: it is an error
    leave_out: Callable[[File, str], bool] = lambda file, reason: False

    def check(self, recipe: Recipe) -> None:
        """Raises UserError for a setting that a run of another of our tasks would take, or one out of its range."""
        for name, least in (("top", 1), ("max_new_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
                expected = f"a whole number of at least {least}"
                raise UserError(f"{_TAKEN_BY[name][0]}: got {str(value)[:40]}, expected {expected}")
        for name in ("min_score", "temperature"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                expected = "a finite number of at least 0"
                raise UserError(f"{_TAKEN_BY[name][0]}: got {str(value)[:40]}, expected {expected}")
        tasks = {task for _, task in _TAKEN_BY.values()} | {"segmentation"}
        for name, (option, task) in _TAKEN_BY.items():
            value = getattr(self, name)
            if recipe.task in tasks - {task} and value != getattr(PredictInputs, name):
                raise UserError(f"{option}: got {value} with a run of {recipe.task}, expected it with one of {task}")

    @property
    def places(self) -> list[Path]:
        """The paths of the files; an image in memory is called by its number."""
        return [file if isinstance(file, Path) else Path(f"image-{n}") for n, file in enumerate(self.files, 1)]

    @property
    def outputs(self) -> Outputs:
        root = self.root or common_folder([file.absolute().parent for file in self.places] or [Path()])
        return Outputs(self.out or self.drawings, root, self.force)

    def into(self, name: str) -> PredictInputs:
        """The same with results in a folder of that name inside."""
        return replace(self, out=self.out and self.out / name, drawings=self.drawings / name)

    def require_files(self, run: Path, recipe: Recipe) -> Sequence[File]:
        """The files. Raises UserError where a prompt is given in place of them."""
        if self.prompt is not None:
            raise UserError(f"predict: {run} is a run of {recipe.task}, expected one of language for --prompt")
        return self.files

    def readable(self, read: Callable[[Any], T]) -> PredictInputs:
        """The same without the files that :func:`read` cannot read and that may be left out; each is read once.

        Raises:
            UserError: one that may not be left out.
        """
        kept = []
        for file in progress_bar(self.files, "reading"):
            try:
                read(file)
            except UnreadableImage as error:
                if not self.leave_out(file, str(error)):
                    raise _cannot_read(file, error) from None
            else:
                kept.append(file)
        return replace(self, files=kept)

    def model_of(self, run: Path, recipe: Recipe) -> tuple[nn.Module, torch.device]:
        """The run's model in evaluation mode, and its device. Raises UserError where it has no weights."""
        if self.model is None:
            device = pick_device_of_run(recipe.device)
            return optimize(trained_model(run, recipe).to(device), compile=False), device
        return self.model.eval(), next(self.model.parameters()).device


@dataclass(frozen=True)
class Prediction:
    """The result for one input."""

    line: str  # for people; empty where everything has been emitted
    record: Any  # the same as JSON
    input: str = ""  # the name of the file
    answer: str = ""  # in a few words, by which runs are compared; empty where there is nothing to compare


def origin_of(file: File, key: str = "file") -> dict[str, str]:
    """What a record says of where its image comes from: nothing, where it was in memory."""
    return {key: str(file)} if isinstance(file, Path) else {}


def read_files(files: Sequence[File], read: Callable[[Any], T]) -> Iterator[T]:
    """Yield ``read(file)`` for each file, after every file has been read once as a check.

    Raises:
        UserError: a file is missing or is not an image; nothing has been yielded then.
    """
    yield from read_again(PredictInputs(files=files).readable(read).files, read)


def read_again(files: Sequence[File], read: Callable[[Any], T]) -> Iterator[T]:
    """Yield ``read(file)`` for each file of :meth:`PredictInputs.readable`.

    Raises:
        UserError: it has changed meanwhile.
    """
    for file in progress_bar(files, "predicting"):
        try:
            yield read(file)
        except UnreadableImage as error:
            raise _cannot_read(file, error) from None


def _cannot_read(file: File, error: UnreadableImage) -> UserError:
    what = f"{file} as an image" if isinstance(file, Path) else "an image in memory"
    return UserError(f"predict: cannot read {what}: {error}")
