"""The declaration of a study: a YAML file that is read into frozen dataclasses; a mistake in it is one line.

A contender is a model in one setting at several *points*, such as depths. Contenders at the same point are to be of
about the same compute. A *cell* is a contender at a point; it is written ``contender@point``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError, nearest
from ..metrics import METRICS
from ..reading import read_yaml

__all__ = [
    "Cell",
    "Claim",
    "Contender",
    "Criterion",
    "Flatness",
    "Study",
    "Tuning",
    "find_study",
    "studies",
]

_MOST_RATE, _MOST_LETTERS = 1e6, 100
_DECIDED = {"name", "task", "data", "lr", "seed", "score_test"}  # of each run, by the study
DECLARED = Path(__file__).parent / "declared"  # the studies that come with the package


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model in one setting; keys of settings are those of a recipe's overrides, such as ``model.args.widths``."""

    name: str  # of its runs: letters, digits, - and _
    label: str = ""  # in tables and figures
    about: str = ""  # what it is there for
    recipe: str = ""  # a recipe's name or a .yaml file; by default the study's
    settings: dict[str, Any] = field(default_factory=dict)  # at every point
    points: dict[int, dict[str, Any]] = field(default_factory=dict)  # settings by point
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings that are tuned beside the rate
    unequal: str = ""  # why its compute may differ from the others' at a point


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the rate of each cell is chosen: the best by the study's metric on the held-out split, at a run's end."""

    rates: tuple[float, ...]  # the grid; while the best is at an edge, it grows by the ratio there
    seed: int = 0  # of the tuning runs
    length: float = 1 / 3  # share of the full length, warm-up included
    most_rates: int = 8  # the grid grows no further


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """A run is long enough if ``key`` changes by less than ``within``, relatively, over the last ``share`` of it."""

    key: str = "train_clean_loss"  # what is looked at
    share: float = 0.1  # of a run, its last
    within: float = 0.02  # the relative change there is to be less

    @property
    def parts(self) -> tuple[str, str] | None:
        """The split and the metric of ``key``; None for another."""
        found = re.fullmatch(rf"(train|train_clean|train_mixed|val)_({'|'.join(METRICS)})", self.key)
        return found and (found[1], found[2])


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Whether one cell is better than another on the test split, by the paired differences over the final seeds.

    With d = ``left`` - ``right``, signed so that more is better, and its t-interval at ``level``:

    - ``above``: for where the interval lies above 0; against where it lies below ``margin``, and not above 0
    - ``not_above``: for where the interval lies below ``margin``, and not above 0; against where it lies above 0

    and undecided else. ``margin`` is the smallest difference that would matter, in the metric's unit.
    """

    name: str  # in the table of verdicts
    left: str  # contender@point
    right: str  # contender@point, that it is held against
    expect: Literal["above", "not_above"] = "above"  # whether left is to be better than right, or not
    margin: float = 0.0  # the smallest difference that would matter, in the metric's unit
    level: float = 0.95  # of the interval


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that may be stated if all of its criteria are met, and its denial, if one is met the other way."""

    text: str  # printed where all of its criteria are met
    denial: str  # printed where one of them is met the other way
    criteria: tuple[str, ...]  # by name


@dataclass(frozen=True)
class Cell:
    contender: str
    point: int

    def __str__(self) -> str:
        return f"{self.contender}@{self.point}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """``settings`` are applied first, then those of the contender, of its point and of its variant."""

    name: str  # after which the folders are called
    question: str  # what it is to answer
    recipe: str  # a recipe's name, or a .yaml file beside this one
    data: str = ""  # by default the recipe's
    settings: dict[str, Any] = field(default_factory=dict)  # overrides of the recipe, of all runs
    metric: str = "top1"  # by which runs are chosen and scored, such as loss
    point: str = "blocks"  # what a point counts
    tuning: Tuning  # how each contender's rate is chosen
    seeds: tuple[int, ...]  # of the final runs
    tuned_on: Literal["val"] = "val"  # the split that settings are chosen by
    scored_on: Literal["test"] = "test"  # once, at each final run's end
    macs_tolerance: float = 0.03  # largest difference from the first contender at a point, relatively
    flatness: Flatness = Flatness()  # when a run is long enough
    contenders: tuple[Contender, ...]  # the first is the one whose compute the others are to have
    order: tuple[tuple[str, ...], ...] = ()  # groups of cells, the first first; what is not named comes last
    criteria: tuple[Criterion, ...] = ()  # which differences are judged, and how
    claims: tuple[Claim, ...] = ()  # what may be stated of them

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(contender.name, point) for contender in self.contenders for point in contender.points)

    @cached_property
    def groups(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells (a contender at a point) in the order in which they are run."""
        named = tuple(tuple(self.cell(text, "order") for text in group) for group in self.order)
        rest = tuple(cell for cell in self.cells if not any(cell in group for group in named))
        return (*named, rest) if rest else named

    def contender(self, name: str) -> Contender:
        return next(contender for contender in self.contenders if contender.name == name)

    def cell(self, text: str, where: str) -> Cell:
        """Raises UserError where no contender has such a point."""
        found = next((cell for cell in self.cells if str(cell) == text), None)
        if found is None:
            known = [str(cell) for cell in self.cells]
            raise UserError(f"{where}: got {text!r}, expected a contender@point{nearest(text, known)}")
        return found

    @property
    def folder(self) -> str:
        return self.name.replace("/", "-")

    def rules_of(self, cell: Cell) -> list[str]:
        """Those of the criteria that are about a cell."""
        return [self.rule(one) for one in self.criteria if str(cell) in (one.left, one.right)]

    def rule(self, criterion: Criterion) -> str:
        """What a verdict is given by, in a line: final runs record it, so that what is declared after them is seen."""
        expected = f"{criterion.left} {criterion.expect} {criterion.right} by {self.metric}"
        flat = self.flatness
        flattened = f"{flat.key} within {flat.within:g} over the last {flat.share:g}"
        seeds = " ".join(map(str, sorted(self.seeds)))
        return f"{expected}, margin {criterion.margin:g}, level {criterion.level:g}, seeds {seeds}, {flattened}"


def studies() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    return {str(file.relative_to(DECLARED).with_suffix("")): file for file in sorted(DECLARED.rglob("*.yaml"))}


def find_study(name: str) -> Study | None:
    """A study by its name or from a .yaml file; None if it is neither, such as the name of a recipe.

    Raises:
        UserError: the file cannot be read, or something in the declaration is wrong.
    """
    is_file = name.endswith((".yaml", ".yml"))
    if not is_file and name not in studies():
        return None
    return read_study(Path(name) if is_file else studies()[name])


def read_study(path: Path) -> Study:
    """Raises UserError if the file cannot be read, is not YAML, or has a wrong key or value."""
    values = read_yaml(path, "study")
    _known_keys(values, Study, f"{path}")
    kinds = {"tuning": Tuning, "flatness": Flatness, "contenders": Contender, "criteria": Criterion, "claims": Claim}
    for key, kind in kinds.items():
        entries = values.get(key)
        for entry in entries if isinstance(entries, list) else [entries]:
            _known_keys(entry, kind, f"{path}: {key}")
    study = _with_own_files(_typed(values, str(path)), path.parent)
    _check(study)
    return study


def _with_own_files(study: Study, folder: Path) -> Study:
    """The study with recipes that are files beside its own."""

    def of(recipe: str) -> str:
        beside = folder / recipe
        return str(beside) if recipe.endswith((".yaml", ".yml")) and beside.is_file() else recipe

    contenders = tuple(replace(contender, recipe=of(contender.recipe)) for contender in study.contenders)
    return replace(study, recipe=of(study.recipe), contenders=contenders)


def _known_keys(values: Any, kind: type, where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    for key in values if isinstance(values, dict) else ():
        if key not in known:
            expected = f"{', '.join(known)}{nearest(str(key), known)}"
            raise UserError(f"{where}: unknown key {key!r}, expected one of {expected}")


def _typed(values: Mapping[str, Any], where: str) -> Study:
    import pydantic

    try:
        return pydantic.TypeAdapter(Study).validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Input should be ")
        if first["type"] == "missing":
            raise UserError(f"{where}: {key}: got none, expected one") from None
        raise UserError(f"{where}: {key}: got {first['input']!r}, expected {message}") from None


def _check(study: Study) -> None:
    """Raises UserError for mistakes that types do not find. Models are checked in run_plan.py."""
    tuning, flat = study.tuning, study.flatness
    if study.metric not in METRICS:
        expected = f"{', '.join(METRICS)}{nearest(study.metric, METRICS)}"
        raise UserError(f"metric: got {study.metric!r}, expected one of {expected}")
    rates = list(tuning.rates)
    if len(rates) < 3 or not all(0 < rate <= _MOST_RATE for rate in rates) or rates != sorted(set(rates)):
        raise UserError(
            f"tuning.rates: got {rates}, expected at least 3 rates above 0 that increase, to {_MOST_RATE:g}"
        )
    if not 0.001 <= tuning.length <= 1:
        raise UserError(f"tuning.length: got {tuning.length}, expected a share of the full length, 0.001 to 1")
    if not len(rates) <= tuning.most_rates <= 100:
        raise UserError(f"tuning.most_rates: got {tuning.most_rates}, expected {len(rates)} to 100")
    for seed in (tuning.seed, *study.seeds):
        if not 0 <= seed < 2**63:
            raise UserError(f"seeds: got {seed}, expected 0 to 2⁶³ - 1")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*", study.name[:_MOST_LETTERS]):
        raise UserError(
            f"name: got {study.name[:40]!r}, expected letters, digits, . - _ and /, of which folders are made"
        )
    if len(study.name) > _MOST_LETTERS:
        raise UserError(f"name: got {len(study.name)} letters, expected at most {_MOST_LETTERS}")
    if not 0 < study.macs_tolerance <= 1:
        raise UserError(f"macs_tolerance: got {study.macs_tolerance}, expected a share above 0 and up to 1")
    if len(set(study.seeds)) < max(len(study.seeds), 2):
        raise UserError(f"seeds: got {list(study.seeds)}, expected at least 2 that differ, for an interval")
    if tuning.seed in study.seeds:
        raise UserError(f"seeds: got {tuning.seed} among them, the tuning's seed; expected others, which chose nothing")
    if not (0 < flat.share < 1 and flat.within > 0):
        raise UserError(f"flatness: got share {flat.share} and within {flat.within}, expected shares above 0")
    if flat.parts is None:
        raise UserError(f"flatness.key: got {flat.key!r}, expected a split and a metric, such as train_clean_loss")
    _check_settings("settings", study.settings)
    _distinct("contenders", [contender.name for contender in study.contenders])
    _distinct("labels", [contender.label or contender.name for contender in study.contenders])
    _distinct("criteria", [criterion.name for criterion in study.criteria])
    for contender in study.contenders:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", contender.name):
            raise UserError(f"contenders: got the name {contender.name!r}, expected letters, digits, - and _")
        if not contender.points:
            raise UserError(f"contenders: {contender.name} has no points, expected at least one")
        for name in contender.variants:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):  # a part of the names of its runs
                raise UserError(
                    f"contenders: {contender.name}: got the variant {name!r}, expected letters, digits, . - and _"
                )
        for settings in (contender.settings, *contender.points.values(), *contender.variants.values()):
            _check_settings(f"contenders: {contender.name}", settings)
    order = [str(cell) for group in study.groups for cell in group]
    _distinct("order", order)
    for criterion in study.criteria:
        for side in ("left", "right"):
            study.cell(getattr(criterion, side), f"criteria: {criterion.name}: {side}")
        if criterion.left == criterion.right:
            raise UserError(f"criteria: {criterion.name}: got {criterion.left} on both sides, expected two cells")
        if not (0 < criterion.level < 1 and 0 <= criterion.margin < math.inf):
            got = f"level {criterion.level} and margin {criterion.margin}"
            raise UserError(f"criteria: {criterion.name}: got {got}, expected 0 to 1 and at least 0")
        if criterion.expect == "not_above" and not criterion.margin:
            raise UserError(f"criteria: {criterion.name}: got not_above without a margin, expected one above 0")
    known = [criterion.name for criterion in study.criteria]
    for claim in study.claims:
        for name in claim.criteria or ("",):
            if name not in known:
                raise UserError(f"claims: got the criterion {name!r}, expected a declared one{nearest(name, known)}")


def _check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Raises UserError for what a study decides by itself."""
    if decided := next((key for key in settings if key in _DECIDED), None):
        raise UserError(f"{where}: got {decided} among the settings, expected it to be left to the study")


def _distinct(what: str, names: Sequence[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None or not (names or what == "criteria"):
        raise UserError(f"{what}: got {repeated or 'none'}{' twice' if repeated else ''}, expected each once")
