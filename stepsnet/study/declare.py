"""The declaration of a study: a YAML file, read into frozen dataclasses; a mistake is reported in one line.

As in settings/config.py, each field declares its type, bounds and meaning.

A contender is a model in one setting at several *points*, such as depths. Contenders at the same point should have
about the same compute. A *cell* is a contender at a point; it is written ``contender@point``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from ..errors import UserError, nearest
from ..files.reading import read_yaml, yaml_file
from ..metrics import METRICS
from ..settings.field_types import STRICT
from ..settings.overrides import first_mistake, known_keys

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

_PART_OF_NAMES = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"  # of runs
_FOLDERS = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$"
_DECIDED = {"name", "task", "data", "lr", "seed", "score_test"}  # for each run, by the study
DECLARED = Path(__file__).parent / "declared"  # the studies that come with the package

Settings = dict[str, Any]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Contender:
    """A model in one setting; settings have the keys of a recipe's overrides, such as ``model.args.widths``."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]+$", description="its name, part of the names of its runs: letters, digits, - and _"
    )
    label: str = Field(default="", description="its name in tables and figures; by default `name`")
    about: str = Field(default="", description="why it is in the study")
    recipe: str = Field(default="", description="a recipe's name, or a .yaml file; by default the study's recipe")
    settings: Settings = Field(default_factory=dict, description="overrides of the recipe at every point")
    points: dict[Annotated[int, Field(ge=1)], Settings] = Field(
        min_length=1, description="its points, each with its overrides"
    )
    variants: dict[Annotated[str, Field(pattern=_PART_OF_NAMES)], Settings] = Field(
        default_factory=dict, description="named sets of overrides, one of which is chosen together with the rate"
    )
    unequal: str = Field(
        default="",
        description="why its compute or training differs from the others' at a point; by default it must not",
    )

    @property
    def title(self) -> str:
        """What it is called in tables and figures."""
        return self.label or self.name

    @property
    def tried(self) -> tuple[str, ...]:
        """The names of its variants; just "" if it has none."""
        return tuple(self.variants) or ("",)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tuning:
    """How the rate of each cell is chosen: the best by the study's metric on the held-out split, at a run's end."""

    rates: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = Field(
        min_length=3,
        description="increasing learning rates to try; while the best is at an edge, the grid grows by the ratio there",
    )
    seeds: tuple[Seed, ...] = Field(
        default=(0,),
        min_length=1,
        description="seeds of the tuning runs; every rate is trained with each of them and judged by the mean",
    )
    length: float = Field(
        default=1 / 3,
        ge=1e-3,
        le=1,
        description="length of a tuning run and of its warm-up, as a share of the full length",
    )
    most_rates: int = Field(default=8, le=100, description="the most rates that a grid may grow to")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Flatness:
    """A run is long enough if ``key`` changes by less than ``within``, relatively, over the last ``share`` of it."""

    key: str = Field(default="train_clean_loss", description="the loss or other metric that must have flattened")
    share: float = Field(
        default=0.1, gt=0, lt=1, description="the last share of a run, over which the change is measured"
    )
    within: float = Field(default=0.02, gt=0, description="the relative change over that share must be less than this")

    @property
    def parts(self) -> tuple[str, str] | None:
        """The split and the metric of ``key``; None for another."""
        found = re.fullmatch(rf"(train|train_clean|val)_({'|'.join(METRICS)})", self.key)
        return found and (found[1], found[2])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Criterion:
    """Whether one cell is better than another on the test split, by the paired differences over the final seeds.

    With d = ``left`` - ``right``, signed so that more is better, and its t-interval at ``level``:

    - ``above``: *for* if the interval lies above 0; *against* if it lies below ``margin``, and not above 0
    - ``not_above``: *for* if the interval lies below ``margin``, and not above 0; *against* if it lies above 0

    and otherwise *undecided*. ``margin`` is the smallest difference that would matter, in the metric's unit.
    """

    name: str = Field(description="its name in the table of verdicts")
    left: str = Field(description="a cell, as contender@point")
    right: str = Field(description="the cell that it is compared with, as contender@point")
    expect: Literal["above", "not_above"] = Field(
        default="above", description="what is expected: that left is better than right, or that it is not"
    )
    margin: float = Field(
        default=0.0, ge=0, description="the smallest difference that would matter, in the metric's unit"
    )
    level: float = Field(default=0.95, gt=0, lt=1, description="confidence level of the interval")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Claim:
    """A sentence that may be stated if all of its criteria are met, and its denial, if one is met the other way."""

    text: str = Field(description="the claim; printed if all of its criteria are met")
    denial: str = Field(description="the denial; printed if one of them is met the other way")
    criteria: tuple[str, ...] = Field(min_length=1, description="names of the criteria that it rests on")

    @property
    def sentence(self) -> str:
        return f"{self.text} / {self.denial}"


@dataclasses.dataclass(frozen=True)
class Cell:
    contender: str
    point: int

    def __str__(self) -> str:
        return f"{self.contender}@{self.point}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Study:
    """A declaration. Its ``settings`` are applied first, then those of the contender, its point and its variant."""

    name: str = Field(max_length=100, pattern=_FOLDERS, description="its name, also that of its folders")
    question: str = Field(description="the question that it is to answer")
    recipe: str = Field(description="a recipe's name, or a .yaml file beside this one")
    data: str = Field(default="", description="the data to train on; by default the recipe's")
    settings: Settings = Field(default_factory=dict, description="overrides of the recipe in all runs")
    metric: str = Field(default="top1", description="the metric by which runs are chosen and scored, such as loss")
    point: str = Field(default="blocks", description="what a point counts")
    tuning: Tuning = Field(description="how each contender's rate is chosen")
    seeds: tuple[Seed, ...] = Field(min_length=2, description="seeds of the final runs")
    tuned_on: Literal["val"] = Field(default="val", description="the split that settings are chosen by")
    scored_on: Literal["test"] = Field(
        default="test", description="the split that each final run is scored on, once, at its end"
    )
    macs_tolerance: float = Field(
        default=0.03,
        gt=0,
        le=1,
        description="largest relative difference in multiply-accumulates from the first contender at a point",
    )
    flatness: Flatness = Field(default=Flatness(), description="when a run is long enough")
    contenders: tuple[Contender, ...] = Field(
        min_length=1,
        description="the models to compare; the first at a point is the one whose compute the others must have",
    )
    order: tuple[tuple[str, ...], ...] = Field(
        default=(), description="groups of cells in the order in which they run; cells that are not named come last"
    )
    criteria: tuple[Criterion, ...] = Field(default=(), description="which differences are judged, and how")
    claims: tuple[Claim, ...] = Field(default=(), description="the sentences that may be stated if criteria are met")

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
        """The cell written ``contender@point``. Raises UserError if no contender has such a point."""
        found = next((cell for cell in self.cells if str(cell) == text), None)
        if found is None:
            known = [str(cell) for cell in self.cells]
            raise UserError(f"{where}: got {text!r}, expected a contender@point{nearest(text, known)}")
        return found

    @property
    def folder(self) -> str:
        return self.name.replace("/", "-")

    def tuning_of(self, cell: Cell) -> str:
        """How a cell is tuned, in one line: final runs record it, so that no tuning is chosen by their test scores."""
        tuning = self.tuning
        rates, seeds = (" ".join(f"{value:g}" for value in values) for values in (tuning.rates, sorted(tuning.seeds)))
        variants = " ".join(sorted(self.contender(cell.contender).variants))
        parts = [f"rates {rates}", f"at most {tuning.most_rates}", f"seeds {seeds}", f"length {tuning.length:g}"]
        return ", ".join(parts + [f"variants {variants}"] * bool(variants))

    def rules_of(self, cell: Cell) -> list[str]:
        """The rules of the criteria that are about a cell."""
        return [self.rule(one) for one in self.criteria if str(cell) in (one.left, one.right)]

    def claims_of(self, cell: Cell) -> list[str]:
        """How each claim about a cell is judged: the rules of its criteria in one line, whatever these are called."""
        return [self.rule_of_claim(claim) for claim in self._claims_about(cell)]

    def sentences_of(self, cell: Cell) -> list[str]:
        """The claims about a cell, as worded."""
        return [claim.sentence for claim in self._claims_about(cell)]

    def _claims_about(self, cell: Cell) -> list[Claim]:
        about = {one.name for one in self.criteria if str(cell) in (one.left, one.right)}
        return [claim for claim in self.claims if about & {*claim.criteria}]

    def rule_of_claim(self, claim: Claim) -> str:
        return "; ".join(sorted(self.rule(one) for one in self.criteria if one.name in claim.criteria))

    def rule(self, criterion: Criterion) -> str:
        """How a verdict is reached, in one line: final runs record it, so that what is declared later is noticed."""
        expected = f"{criterion.left} {criterion.expect} {criterion.right} by {self.metric}"
        flat = self.flatness
        flattened = f"{flat.key} within {flat.within:g} over the last {flat.share:g}"
        seeds = " ".join(map(str, sorted(self.seeds)))
        return f"{expected}, margin {criterion.margin:g}, level {criterion.level:g}, seeds {seeds}, {flattened}"


def studies() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    return {str(file.relative_to(DECLARED).with_suffix("")): file for file in sorted(DECLARED.rglob("*.yaml"))}


def find_study(name: str) -> Study | None:
    """Return a study by its name or from a .yaml file; None if it is neither, such as the name of a recipe.

    Raises:
        UserError: the file cannot be read, or something in the declaration is wrong.
    """
    file = yaml_file(name) or studies().get(name)
    return read_study(file) if file else None


def read_study(path: Path) -> Study:
    """Read a declaration. Raises UserError if the file cannot be read, is not YAML, or has a wrong key or value."""
    values = read_yaml(path, "study")
    if "model" in values:
        raise UserError(f"{path}: got a recipe, expected a study; `stepsnet train {path}` trains it")
    try:
        study = pydantic.TypeAdapter(Study).validate_json(json.dumps(values))
    except pydantic.ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error, known_keys(Study), _unknown)}") from None
    study = _with_own_files(study, path.parent)
    _check(study)
    return study


def _with_own_files(study: Study, folder: Path) -> Study:
    """Return the study with the paths of those recipes that are files beside its own."""

    def of(recipe: str) -> str:
        beside = folder / recipe
        return str(beside) if yaml_file(recipe) and beside.is_file() else recipe

    contenders = tuple(replace(contender, recipe=of(contender.recipe)) for contender in study.contenders)
    return replace(study, recipe=of(study.recipe), contenders=contenders)


def _unknown(key: str, known: Collection[str]) -> str:
    above = ".".join(part for part in key.split(".")[:-1] if not part.isdecimal())
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == above]
    return f"unknown key {key!r}, expected one of {', '.join(beside)}{nearest(key.rpartition('.')[2], beside)}"


def _check(study: Study) -> None:
    """Raises UserError for mistakes that types do not catch. Models and metrics are checked in run_plan.py."""
    tuning = study.tuning
    rates = list(tuning.rates)
    if rates != sorted(set(rates)):
        raise UserError(f"tuning.rates: got {rates}, expected rates that increase")
    if tuning.most_rates < len(rates):
        raise UserError(f"tuning.most_rates: got {tuning.most_rates}, expected {len(rates)} to 100")
    if len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"seeds: got {list(study.seeds)}, expected at least 2 seeds, all distinct")
    _distinct("tuning.seeds", tuning.seeds)
    if shared := {*tuning.seeds} & {*study.seeds}:
        raise UserError(
            f"seeds: got {min(shared)}, which is one of tuning.seeds too, expected seeds by which no rate is chosen"
        )
    _check_settings("settings", study.settings)
    _distinct("contenders", [contender.name for contender in study.contenders])
    _distinct("labels", [contender.title for contender in study.contenders])
    _distinct("criteria", [criterion.name for criterion in study.criteria])
    for contender in study.contenders:
        for settings in (contender.settings, *contender.points.values(), *contender.variants.values()):
            _check_settings(f"contenders: {contender.name}", settings)
    order = [str(cell) for group in study.groups for cell in group]
    _distinct("order", order)
    for criterion in study.criteria:
        for side in ("left", "right"):
            study.cell(getattr(criterion, side), f"criteria: {criterion.name}: {side}")
        if criterion.left == criterion.right:
            raise UserError(f"criteria: {criterion.name}: got {criterion.left} on both sides, expected two cells")
        if criterion.expect == "not_above" and not criterion.margin:
            raise UserError(f"criteria: {criterion.name}: got not_above without a margin, expected one above 0")
    known = [criterion.name for criterion in study.criteria]
    for claim in study.claims:
        for name in claim.criteria:
            if name not in known:
                raise UserError(f"claims: got the criterion {name!r}, expected a declared one{nearest(name, known)}")


def _check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Raises UserError for a setting that the study itself decides."""
    if decided := next((key for key in settings if key in _DECIDED), None):
        raise UserError(f"{where}: got {decided} among the settings, expected it to be left to the study")


def _distinct(what: str, names: Sequence[str | int]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{what}: got {repeated} twice, expected each once")
