"""The runs of a study: which of them can start, as a function of the declaration and the results so far."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.optim import check_rates
from ..errors import UserError, nearest
from ..metrics import METRICS, higher_is_better
from ..recipes import find_or_read
from ..runs.check import DataOnce, check_grid
from ..settings.config import OF_THE_DATA, OF_THE_LENGTH, DenseRecipe, Recipe
from ..settings.from_data import leaves_open
from ..settings.overrides import override_values
from ..tasks import macs_of
from ..tasks.splits import split_of
from .declare import Cell, Study

__all__ = [
    "Choice",
    "Planned",
    "a_final",
    "check_models",
    "choice_of",
    "data_of",
    "due",
    "is_planned",
    "diverged_everywhere",
    "progress",
    "recipe_of",
    "with_variant",
]


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
    """The result of tuning a cell. ``at_edge`` is True if a variant's best rate is at an edge of a grid that may not
    grow further, or all of its rates diverged: a variant that was not chosen might have become the better one."""

    variant: str
    rate: float
    at_edge: bool


def a_final(study: Study, cell: Cell, variant: str) -> Planned:
    """A final run of a cell, to look up what all of them have in common."""
    return Planned(cell, "final", variant, study.tuning.rates[0], study.seeds[0])


def recipe_of(study: Study, planned: Planned, data: str | None = None) -> Recipe:
    """The recipe of one run. Its title says which run of the study it is, unless the study's settings give another.

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
    # the base's title is about its own model and baseline
    title = f"{contender.title}{f' ({planned.variant})' if planned.variant else ''}"
    title += f", at {planned.cell.point} {study.point} of the study {study.name}"
    recipe = dataclasses.replace(base, baseline=None, expected={}, name=name, title=title)
    if data or study.data:
        recipe = dataclasses.replace(recipe, data=data or study.data)
    of_variant = contender.variants.get(planned.variant, {})
    try:
        for settings in (study.settings, contender.settings, contender.points[planned.cell.point], of_variant):
            recipe = override_values(recipe, settings, merge=False)
    except UserError as error:
        raise UserError(f"{planned.cell}: {error}") from None
    if not hasattr(recipe, "score_test"):
        expected = "expected one whose runs can be scored on the test split"
        raise UserError(f"{planned.cell}: got a recipe of {recipe.task}, which has no score_test, {expected}")
    changes: dict[str, Any] = {"lr": planned.rate, "seed": planned.seed, "score_test": planned.kind == "final"}
    if planned.kind == "tuning":
        length = study.tuning.length
        changes["epochs"] = max(1, round(recipe.epochs * length))
        share = changes["epochs"] / recipe.epochs
        if abs(share - length) > length / 2:
            got = f"{length:g} of {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}"
            raise UserError(f"tuning.length: {planned.cell}: got {got}, expected about a whole number of epochs")
        changes["warmup_epochs"] = recipe.warmup_epochs * share
        changes["milestones"] = tuple(epoch * share for epoch in recipe.milestones)
    return dataclasses.replace(recipe, **changes)


def check_models(study: Study, data: str | None = None, open_data: bool = True) -> dict[tuple[Cell, str], int]:
    """Build the model of every cell and variant on the meta device, and return their multiply-accumulates.

    Args:
        data: used in place of the declaration's.
        open_data: whether to open the data, once for all cells that share them; if not, models that depend on them are
            not built, nor any for detection or segmentation.

    Raises:
        UserError: a recipe, its data or its model cannot be made or do not fit; the runs do not measure what the study
            rests on; two contenders at a point have equal settings; or a contender that does not say why differs from
            the first one there in its training, or in its compute by more than ``macs_tolerance``.
    """
    _check_names(study)
    data_of(study, data)  # this reads the recipes, whose modules may have metrics of their own
    _check_metrics(study)
    _check_differences(study)
    found: dict[tuple[Cell, str], int] = {}
    opened = DataOnce()
    for cell in study.cells:
        for variant in study.contender(cell.contender).tried:
            final = a_final(study, cell, variant)
            recipe_of(study, dataclasses.replace(final, kind="tuning"), data)  # to see that it can be made
            recipe, macs = recipe_of(study, final, data), None
            _check_gives(study, cell, recipe)
            _check_lowest_rate(study, cell, recipe)
            if open_data:
                try:
                    checked = check_grid([recipe], [0], 1, opened, with_macs=True)[0]
                except UserError as error:
                    raise UserError(f"{cell}: {error}") from None
                recipe, macs = checked.recipe, checked.macs
            elif leaves_open(recipe) or isinstance(recipe, DenseRecipe):
                continue
            found[cell, variant] = macs_of(recipe) if macs is None else macs
    for (cell, variant), macs in found.items():
        first, first_macs = next((other, found[other, v]) for other, v in found if other.point == cell.point)
        off = macs / first_macs - 1
        if abs(off) > study.macs_tolerance and not study.contender(cell.contender).unequal:
            raise UserError(
                f"{with_variant(cell, variant)}: got {macs / 1e6:.2f}M multiply-accumulates, {off:+.1%} compared with "
                f"{first}, expected at most ±{study.macs_tolerance:.0%} (or `unequal` with the reason)"
            )
    return found


def with_variant(cell: Cell, variant: str) -> str:
    return f"{cell}, {variant}" if variant else str(cell)


def data_of(study: Study, data: str | None = None) -> str:
    """Return the data that all runs are trained on: ``data``, else the declaration's, else the recipes'.

    Raises:
        UserError: the recipes have different data, or a split of them, by which runs would be both chosen and scored,
            or a recipe cannot be made.
    """
    found: dict[str, Cell] = {}
    for cell in study.cells:
        run = a_final(study, cell, study.contender(cell.contender).tried[0])
        found.setdefault(recipe_of(study, run, data).data, cell)
    if len(found) > 1:
        (first, of), (second, other) = list(found.items())[:2]
        raise UserError(f"data: got {first} for {of} and {second} for {other}, expected one data set for all")
    (one,) = found
    if (whole := split_of(one)[0]) != one:
        raise UserError(f"data: got {one}, expected {whole}: a study is tuned on one split and scored on another")
    return one


def _check_names(study: Study) -> None:
    """Raises UserError if two runs have the same name, as those of a-1 at 2 and of a at 1 in its variant 2 would."""
    runs = [
        Planned(cell, "tuning", variant, rate, seed)
        for cell in study.cells
        for variant in study.contender(cell.contender).tried
        for rate in study.tuning.rates
        for seed in study.tuning.seeds
    ]
    of_name: dict[str, Planned] = {}
    for run in runs:
        if (other := of_name.setdefault(run.name, run)) != run:
            raise UserError(
                f"contenders: got {other.cell} and {run.cell}, which would both have a run named {run.name}, expected "
                "names that keep them apart"
            )


def _check_metrics(study: Study) -> None:
    """Raises UserError if no task has the metric, or the loss that is to be flat."""
    if study.metric not in METRICS:
        expected = f"{', '.join(METRICS)}{nearest(study.metric, METRICS)}"
        raise UserError(f"metric: got {study.metric!r}, expected one of {expected}")
    if study.flatness.parts is None:
        got = study.flatness.key
        raise UserError(f"flatness.key: got {got!r}, expected a split and a metric, such as train_clean_loss")


def _check_differences(study: Study) -> None:
    """Raises UserError if contenders at a point do not differ, or if data, length or evaluation do without a reason."""
    # set alike, since they make no difference: the name is the cell's, the rest may come from a contender's own recipe
    alike: dict[str, Any] = {"name": study.name, "title": "", "imports": (), "import_from": None}
    at_point: dict[int, list[tuple[Cell, str, Recipe]]] = {}
    for cell in study.cells:
        for variant in study.contender(cell.contender).tried:
            recipe = recipe_of(study, a_final(study, cell, variant))
            recipe = dataclasses.replace(recipe, **alike)
            others = at_point.setdefault(cell.point, [])
            for other, of_variant, theirs in others:
                if recipe == theirs:
                    both = f"{with_variant(other, of_variant)} and {with_variant(cell, variant)}"
                    raise UserError(f"contenders: got the same settings for {both}, expected different ones")
            others.append((cell, variant, recipe))
    for others in at_point.values():
        first, _, expected = others[0]
        for cell, _, recipe in others:
            for key in _keys_of_training(expected):
                got, wanted = getattr(recipe, key, None), getattr(expected, key, None)
                if got != wanted and not study.contender(cell.contender).unequal:
                    raise UserError(
                        f"{cell}: got {key} {got}, where {first} has {wanted}, expected the same (or `unequal` with "
                        "the reason)"
                    )


def _keys_of_training(recipe: Recipe) -> list[str]:
    """The settings in which contenders at a point may not differ, including those of evaluation."""
    of_evaluation = [key for key in vars(recipe) if key.startswith("eval_") and key != "eval_batch_size"]
    # the batch size decides how many updates, or how much data, an epoch has
    return [*OF_THE_LENGTH, *OF_THE_DATA, "batch_size", "clean_samples", *of_evaluation]


def _check_gives(study: Study, cell: Cell, recipe: Any) -> None:
    """Raises UserError if the runs do not measure the metric or the loss that is declared."""
    given = vars(type(recipe)).get("scores", ())  # a type that derives from one of ours may be scored by others
    if given and study.metric not in given:
        raise UserError(
            f"metric: got {study.metric!r} for {cell}, a recipe of {recipe.task}, expected one of {', '.join(given)}"
        )
    assert study.flatness.parts is not None  # checked before
    split, metric = study.flatness.parts
    if split == "train_clean" and not getattr(recipe, "clean_samples", 0):
        reason = "has clean_samples 0, expected at least 1"
        if not hasattr(recipe, "clean_samples"):
            reason = f"is of {recipe.task}, which scores no clean samples; expected train_loss or val_loss"
        raise UserError(f"flatness.key: got {study.flatness.key}, but {cell} {reason}")
    if given and metric not in (given if split == "val" else ("loss", *given[:1])):
        raise UserError(f"flatness.key: got {study.flatness.key}, which the runs of {cell} do not measure")


def _check_lowest_rate(study: Study, cell: Cell, recipe: Recipe) -> None:
    """Raises UserError if a run at the lowest rate that the grid may grow to would be refused."""
    rates, grows = study.tuning.rates, study.tuning.most_rates - len(study.tuning.rates)
    lowest = rates[0] * (rates[0] / rates[1]) ** grows
    try:
        check_rates(dataclasses.replace(recipe, lr=lowest))
    except UserError as error:
        raise UserError(f"{cell}: {error} (the lowest rate that the grid may grow to)") from None


def due(study: Study, results: Mapping[str, Mapping[str, Any]], cells: Sequence[Cell] | None = None) -> list[Planned]:
    """The runs that can start now, the most valuable first: by group, tuning and the first seed; then the other seeds.

    Args:
        results: by the run's name; a run that diverged is among them, without metrics.
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
    """The best variant and rate; None until all runs of the grid, as far as it has to grow, have ended, and if every
    rate diverged."""
    grid = _grid(study, cell, results)
    if any(planned.name not in results for planned in grid):
        return None
    best = _best(study, grid, results)
    if best is None:
        return None
    of_variants = ([one for one in grid if one.variant == variant] for variant in {one.variant for one in grid})
    return Choice(*best, any(_is_at_edge(study, runs, results) for runs in of_variants))


def diverged_everywhere(study: Study, cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every rate diverged in a grid that does not grow further."""
    grid = _grid(study, cell, results)
    return all(planned.name in results for planned in grid) and _best(study, grid, results) is None


def is_planned(study: Study, planned: Planned, results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a run is among those that the declaration asks for, as far as the grids have grown, or may have grown
    if the result of a tuning run is missing."""
    grid = _grid(study, planned.cell, results)
    tuning = {one.rate for one in grid if one.variant == planned.variant}
    if any(one.name not in results for one in grid):
        tuning |= _rates_within_reach(study)
    seeds = study.seeds if planned.kind == "final" else study.tuning.seeds
    return planned.kind in ("tuning", "final") and planned.rate in tuning and planned.seed in seeds


def progress(study: Study, results: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """How many runs have ended, and how many there will be, as far as the grids have grown."""
    tuning = [planned.name for cell in study.cells for planned in _grid(study, cell, results)]
    finals = [cell for cell in study.cells if not diverged_everywhere(study, cell, results) for _ in study.seeds]
    there = sum(name in results for name in tuning)
    for cell in study.cells:
        choice = choice_of(study, cell, results)
        if choice:
            there += sum(
                Planned(cell, "final", choice.variant, choice.rate, seed).name in results for seed in study.seeds
            )
    return there, len(tuning) + len(finals)


def _grid(study: Study, cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> list[Planned]:
    """The tuning runs of a cell, as far as the results so far make the grid of each variant grow."""
    tuning, variants = study.tuning, study.contender(cell.contender).tried
    rates = {variant: list(tuning.rates) for variant in variants}
    while True:
        grid = [
            Planned(cell, "tuning", variant, rate, seed)
            for variant in variants
            for rate in rates[variant]
            for seed in tuning.seeds
        ]
        if any(planned.name not in results for planned in grid):
            return grid
        more = {
            variant: _next_rate(study, [one for one in grid if one.variant == variant], results) for variant in rates
        }
        if not any(more.values()):
            return grid
        for variant, rate in more.items():
            rates[variant] += [rate] if rate else []


def _next_rate(study: Study, grid: Sequence[Planned], results: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The rate by which a variant's grid grows: beyond its edge, if the best is there; None if the grid is complete."""
    tried = sorted({planned.rate for planned in grid})
    best = _best(study, grid, results)
    rate = tried[0] if best is None else best[1]  # every rate diverged: lower ones
    if len(tried) >= study.tuning.most_rates or tried[0] < rate < tried[-1]:
        return None
    return _beyond(tried[0], tried[1]) if rate == tried[0] else _beyond(tried[-1], tried[-2])


def _beyond(edge: float, inner: float) -> float:
    """The rate by which a grid grows at an edge, at the ratio of the edge to the rate beside it."""
    return float(f"{edge**2 / inner:.6g}")


def _rates_within_reach(study: Study) -> set[float]:
    """All rates to which a grid may grow."""
    rates = list(study.tuning.rates)
    for _ in range(study.tuning.most_rates - len(rates)):
        rates = [_beyond(rates[0], rates[1]), *rates, _beyond(rates[-1], rates[-2])]
    return set(rates)


def _is_at_edge(study: Study, grid: Sequence[Planned], results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the best of a variant's runs have the lowest or the highest rate, or all diverged."""
    best, rates = _best(study, grid, results), [planned.rate for planned in grid]
    return best is None or best[1] in (min(rates), max(rates))


def _best(study: Study, grid: Sequence[Planned], results: Mapping[str, Mapping[str, Any]]) -> tuple[str, float] | None:
    """The variant and rate that are best on average over the tuning's seeds, of equal ones that with the lower rate;
    None if all diverged, each with at least one seed."""
    key, sign = f"{study.tuned_on}_{study.metric}", 1 if higher_is_better(study.metric) else -1
    scores: dict[tuple[str, float], list[float]] = {}
    for planned in grid:
        value = results[planned.name].get("metrics", {}).get(key)
        scores.setdefault((planned.variant, planned.rate), []).append(math.nan if value is None else sign * value)
    means = {at: statistics.fmean(values) for at, values in scores.items()}
    trained = [at for at, mean in means.items() if math.isfinite(mean)]
    return min(trained, key=lambda at: (-means[at], at[1], at[0])) if trained else None
