"""The runs of a study: which of them can start, as a function of the declaration and the results so far."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..config import ClassificationRecipe, LanguageRecipe, Recipe
from ..errors import UserError
from ..from_data import leaves_open
from ..metrics import higher_is_better
from ..models.build import build_model
from ..overrides import override
from ..recipes import find_or_read
from ..runs.check import DataOnce
from ..tasks import resolve
from .declare import Cell, Study

__all__ = ["Choice", "Planned", "check_models", "choice_of", "due", "progress", "recipe_of"]


@dataclass(frozen=True)
class Planned:
    """One run. A final one is scored on the test split, once, at its end."""

    cell: Cell
    kind: Literal["tuning", "final"]
    variant: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.cell.contender}-{self.cell.point}{variant}-{self.kind}-lr{self.rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Choice:
    """The result of tuning a cell; ``at_edge`` if the best rate is at an edge of a grid that may not grow further."""

    variant: str
    rate: float
    at_edge: bool
    tried: int  # runs


def recipe_of(study: Study, planned: Planned, data: str | None = None) -> Recipe:
    """The recipe of one run.

    Raises:
        UserError: the recipe is not there, or does not take the settings.
    """
    contender = study.contender(planned.cell.contender)
    source = contender.recipe or study.recipe
    try:
        base = find_or_read(source)
    except UserError as error:
        raise UserError(f"{planned.cell}: {error}") from None
    name = f"{study.name}/{planned.cell.contender}-{planned.cell.point}"
    recipe = dataclasses.replace(base, baseline=None, expected={}, name=name)
    if data or study.data:
        recipe = dataclasses.replace(recipe, data=data or study.data)
    of_variant = contender.variants.get(planned.variant, {})
    try:
        for settings in (study.settings, contender.settings, contender.points[planned.cell.point], of_variant):
            recipe = override(recipe, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    except UserError as error:
        raise UserError(f"{planned.cell}: {error}") from None
    if not hasattr(recipe, "score_test"):
        raise UserError(f"{planned.cell}: {recipe.task} has no test split, expected classification or language")
    changes: dict[str, Any] = {"lr": planned.rate, "seed": planned.seed, "score_test": planned.kind == "final"}
    if planned.kind == "tuning":
        length = study.tuning.length
        changes["epochs"] = max(1, round(recipe.epochs * length))
        changes["warmup_epochs"] = recipe.warmup_epochs * changes["epochs"] / recipe.epochs
    return dataclasses.replace(recipe, **changes)


def check_models(study: Study, data: str | None = None, open_data: bool = True) -> dict[Cell, int]:
    """Build every cell's model on the meta device; returns multiply-accumulates.

    Args:
        data: in place of the declaration's.
        open_data: where a recipe leaves something of its model to them; otherwise that cell's model is not built.

    Raises:
        UserError: a recipe or model that cannot be made, or compute that differs from the first contender's at a
            point by more than ``macs_tolerance``, of a contender that does not say why.
    """
    found: dict[Cell, int] = {}
    opened = DataOnce()
    for cell in study.cells:
        for variant in study.contender(cell.contender).variants or {"": {}}:
            recipe = recipe_of(study, Planned(cell, "final", variant, study.tuning.rates[0], study.seeds[0]), data)
            if recipe.task == "classification" and not getattr(recipe, "holdout", None):
                raise UserError(f"{cell}: got no holdout, expected training images to choose by, beside the test split")
            if leaves_open(recipe):
                if not open_data:
                    continue
                recipe, _ = resolve(recipe, opened.open(recipe))
            found[cell] = macs_of(recipe)
    for cell, macs in found.items():
        first = next(other for other in found if other.point == cell.point)
        off = macs / found[first] - 1
        if abs(off) > study.macs_tolerance and not study.contender(cell.contender).unequal:
            raise UserError(
                f"{cell}: got {macs / 1e6:.2f}M multiply-accumulates, {off:+.1%} of {first}'s, expected within "
                f"{study.macs_tolerance:.0%} (or `unequal`, which says why)"
            )
    return found


def macs_of(recipe: Recipe) -> int:
    from ..analysis.complexity import count_complexity, count_language_model
    from ..models.build import input_size_of
    from ..tasks.classification.input_size import input_size

    with torch.device("meta"):
        model = build_model(recipe.model)
    if isinstance(recipe, LanguageRecipe):
        return count_language_model(model, recipe.seq_len).macs
    size = input_size(recipe, model) if isinstance(recipe, ClassificationRecipe) else input_size_of(recipe.model, model)
    return count_complexity(model, size).macs


def due(study: Study, results: Mapping[str, Mapping[str, Any]], cells: Sequence[Cell] | None = None) -> list[Planned]:
    """The runs that can start now, the most valuable first: tuning, the first seed, and other seeds last.

    Args:
        results: by the run's name; a run that diverged is there without its metrics.
        cells: those that are asked for; by default all.
    """
    ranked: list[tuple[tuple[int, ...], Planned]] = []
    for number, group in enumerate(study.groups):
        for cell in group:
            if cells is not None and cell not in cells:
                continue
            grid = _grid(study, cell, results)
            ranked += [((0, number, 0, i), planned) for i, planned in enumerate(grid) if planned.name not in results]
            if choice := choice_of(study, cell, results):
                finals = (Planned(cell, "final", choice.variant, choice.rate, seed) for seed in study.seeds)
                ranked += [
                    ((turn, number, 1), planned) for turn, planned in enumerate(finals) if planned.name not in results
                ]
    return [planned for _, planned in sorted(ranked, key=lambda pair: pair[0])]


def choice_of(study: Study, cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> Choice | None:
    """The best variant and rate; None until all runs of the grid, as far as it has to grow, have ended."""
    grid = _grid(study, cell, results)
    if any(planned.name not in results for planned in grid):
        return None
    best = _best(study, grid, results)
    if best is None:
        return None
    rates = [planned.rate for planned in grid if planned.variant == best.variant]
    return Choice(best.variant, best.rate, best.rate in (min(rates), max(rates)), len(grid))


def progress(study: Study, results: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """How many runs have ended, and how many there will be, as far as the grids have grown."""
    tuning = [planned.name for cell in study.cells for planned in _grid(study, cell, results)]
    finals = [f"{cell.contender}-{cell.point}" for cell in study.cells for _ in study.seeds]
    there = sum(name in results for name in tuning)
    for cell in study.cells:
        choice = choice_of(study, cell, results)
        if choice:
            there += sum(
                Planned(cell, "final", choice.variant, choice.rate, seed).name in results for seed in study.seeds
            )
    return there, len(tuning) + len(finals)


def _grid(study: Study, cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> list[Planned]:
    """The tuning runs of a cell, as far as the results so far make the grid grow."""
    tuning, variants = study.tuning, list(study.contender(cell.contender).variants) or [""]
    rates = {variant: list(tuning.rates) for variant in variants}
    while True:
        grid = [Planned(cell, "tuning", variant, rate, tuning.seed) for variant in variants for rate in rates[variant]]
        if any(planned.name not in results for planned in grid):
            return grid
        best = _best(study, grid, results)
        if best is None:  # every rate diverged: lower ones
            best = Planned(cell, "tuning", variants[0], min(rates[variants[0]]), tuning.seed)
        tried = sorted(rates[best.variant])
        if len(tried) >= tuning.most_rates or tried[0] < best.rate < tried[-1]:
            return grid
        more = tried[0] ** 2 / tried[1] if best.rate == tried[0] else tried[-1] ** 2 / tried[-2]
        rates[best.variant].append(float(f"{more:.6g}"))


def _best(study: Study, grid: Sequence[Planned], results: Mapping[str, Mapping[str, Any]]) -> Planned | None:
    """The best of the runs, and of two equal ones that with the lower rate; None if all diverged."""
    sign = 1 if higher_is_better(study.metric) else -1
    scored = []
    for planned in grid:
        value = results[planned.name].get("metrics", {}).get(f"{study.tuned_on}_{study.metric}")
        if value is not None and math.isfinite(value):
            scored.append((-sign * value, planned.rate, planned.variant, planned))
    return min(scored, key=lambda entry: entry[:3])[3] if scored else None
