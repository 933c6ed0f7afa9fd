"""Checks of several recipes, and what the user is told, before the first run starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.task import data_counts
from ..errors import UserError
from ..models.build import DETECTORS, build_model
from ..output.console import Display
from ..settings.config import ABOUT_THE_RECIPE, OF_THE_MODEL, Recipe, TrainingSettings
from ..tasks import open_data
from .advice import on_settings
from .prepare import build_and_start, open_and_resolve

__all__ = ["CheckedRecipe", "DataOnce", "check_grid", "tell"]

_NAMES = 3  # of recipes, at most, in front of a line


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that can be trained, as far as that is known without training it."""

    recipe: Recipe  # completed with what its data decide
    model: nn.Module  # on the meta device
    lines: list[str]  # for the user, before the training
    data_counts: dict[str, int] | None  # None if only the runs open the data
    macs: int | None = None  # of a forward pass, if they were asked for and the data are open
    has_checkpoints: bool = False  # each of its runs has some, or has ended


def check_grid(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    jobs: int,
    data: DataOnce | None = None,
    with_macs: bool = False,
    has_checkpoints: Sequence[bool] = (),
) -> list[CheckedRecipe]:
    """Find mistakes before anything is written or trained. Data that several recipes share are opened once.

    Args:
        data: what earlier calls have opened.
        with_macs: count each model's multiply-accumulates too.
        has_checkpoints: for each recipe, whether all of its runs have checkpoints or have ended, so that the weights to
            start from are not read; by default there are no runs yet.

    Raises:
        UserError: too few jobs, seeds that repeat, a model that cannot be built, or data or weights that do not exist
            or do not fit it.
    """
    whole = [isinstance(number, int) and not isinstance(number, bool) for number in (jobs, *seeds)]
    in_bounds = all(whole) and jobs >= 1 and all(0 <= seed < 2**63 for seed in seeds)
    if not in_bounds or not seeds or len(set(seeds)) != len(seeds):
        got = f"{str(jobs)[:40]} and {str(list(seeds))[:80]}"
        raise UserError(f"--jobs and --seeds: got {got}, expected at least 1 job and distinct seeds of at least 0")
    found, data = [], data or DataOnce()
    for recipe, goes_on in zip(recipes, has_checkpoints or [False] * len(recipes)):
        recipe, opened, lines = open_and_resolve(recipe, data.open)
        counts = macs = None
        if opened is None:
            with torch.device("meta"):
                model = build_model(recipe.model)
        else:
            model, task, of_weights = build_and_start(recipe, opened, has_checkpoints=goes_on, on_meta=True)
            lines += [*of_weights, *task.remarks()]
            counts = data_counts(task)
            macs = task.complexity(model).macs if with_macs else None
        found.append(CheckedRecipe(recipe, model, [*lines, *on_settings(recipe)], counts, macs, goes_on))
    return found


def tell(display: Display, names: Sequence[str], checked: Sequence[CheckedRecipe]) -> None:
    """Show the lines of several recipes, each line once, with the names of the recipes it applies to."""
    of_line: dict[str, list[str]] = {}
    for name, one in zip(names, checked):
        for line in one.lines:
            of_line.setdefault(line, []).append(name)
    for line, which in of_line.items():
        shown = which if len(which) <= _NAMES else [f"{len(which)} recipes"]
        display.note(", ".join(shown), line)


class DataOnce:
    """The data of recipes, opened once for all recipes that share them."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}

    def open(self, recipe: Recipe) -> Any:
        """Return the data as :func:`stepsnet.tasks.open_data` does."""
        of_training = {field.name for field in dataclasses.fields(TrainingSettings)} - {"seed"}
        other = OF_THE_MODEL | ABOUT_THE_RECIPE | of_training
        of_data = {key: value for key, value in dataclasses.asdict(recipe).items() if key not in other}
        of_data["masks"] = DETECTORS.get(recipe.model.name)  # not every detector reads them
        if (key := json.dumps(of_data)) not in self.opened:
            self.opened[key] = open_data(recipe)
        return self.opened[key]
