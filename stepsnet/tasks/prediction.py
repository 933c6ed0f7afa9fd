"""What `stepsnet predict` passes to a task and gets back, and what the tasks' predictions share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import nn

from ..device import pick_device_of_run
from ..errors import UserError
from ..models.optimize import optimize
from ..models.trained import trained_model
from ..output.console import progress_bar
from ..settings.config import Recipe
from .images import UnreadableImage
from .outputs import Outputs, common_folder

__all__ = ["File", "PredictInputs", "Prediction", "origin_of", "read_again"]

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
    """A user's inputs and settings; each task uses the fields that apply to it."""

    files: Sequence[File] = ()
    prompt: str | None = None
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0 takes the likeliest token each time
    seed: int = 0
    top: int = 5  # classes per image
    out: Path | None = None  # the folder for what is written
    drawings: Path = Path("predictions")  # the folder for drawings, if `out` is None
    root: Path | None = None  # the folder that `out` mirrors; by default the deepest that all files are in
    force: bool = False  # replace what others have written there
    writes: bool = True  # False: nothing is drawn or written
    min_score: float = 0.5  # objects with a lower score are not drawn
    emit: Callable[[str], None] = lambda text: None  # called with each piece of a text as it is generated
    model: nn.Module | None = None  # the run's, if it has been loaded already
    # called with a file that cannot be read, and the reason; True: predict the others, False: this is an error
    leave_out: Callable[[File, str], bool] = lambda file, reason: False

    def check(self, recipe: Recipe) -> None:
        """Raises UserError if a setting is out of range, or only applies to another of our tasks than the recipe's."""
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
                raise UserError(f"{option}: got {value} with a run of {recipe.task}, expected a run of {task}")

    @property
    def places(self) -> list[Path]:
        """The paths of the files; an image in memory is named by its number."""
        return [file if isinstance(file, Path) else Path(f"image-{n}") for n, file in enumerate(self.files, 1)]

    @property
    def outputs(self) -> Outputs:
        root = self.root or common_folder([file.absolute().parent for file in self.places] or [Path()])
        return Outputs(self.out or self.drawings, root, self.force)

    def into(self, name: str) -> PredictInputs:
        """The same inputs, with results in a subfolder of this name."""
        return replace(self, out=self.out and self.out / name, drawings=self.drawings / name)

    def require_files(self, run: Path, recipe: Recipe) -> Sequence[File]:
        """The files. Raises UserError if a prompt is given instead."""
        if self.prompt is not None:
            raise UserError(f"predict: {run} is a run of {recipe.task}, expected a run of language for --prompt")
        return self.files

    def readable(self, read: Callable[[Any], T]) -> PredictInputs:
        """The same inputs without the files that ``read`` cannot read and that may be left out; each is read once.

        Raises:
            UserError: a file cannot be read and may not be left out.
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
        """The run's model in evaluation mode, and its device. Raises UserError if it has no weights."""
        if self.model is None:
            device = pick_device_of_run(recipe.device)
            return optimize(trained_model(run, recipe).to(device), compile=False), device
        return self.model.eval(), next(self.model.parameters()).device


@dataclass(frozen=True)
class Prediction:
    """The result for one input."""

    line: str  # for people; empty if everything has been emitted
    record: Any  # the same as JSON
    input: str = ""  # the name of the file
    answer: str = ""  # a few words, by which runs are compared; empty if there is nothing to compare


def origin_of(file: File, key: str = "file") -> dict[str, str]:
    """What a record says about where its image comes from: nothing if it was in memory."""
    return {key: str(file)} if isinstance(file, Path) else {}


def read_again(files: Sequence[File], read: Callable[[Any], T]) -> Iterator[T]:
    """Yield ``read(file)`` for each file of :meth:`PredictInputs.readable`.

    Raises:
        UserError: a file has changed in the meantime and cannot be read any more.
    """
    for file in progress_bar(files, "predicting"):
        try:
            yield read(file)
        except UnreadableImage as error:
            raise _cannot_read(file, error) from None


def _cannot_read(file: File, error: UnreadableImage) -> UserError:
    what = f"{file} as an image" if isinstance(file, Path) else "an image in memory"
    return UserError(f"predict: cannot read {what}: {error}")
