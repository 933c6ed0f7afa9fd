"""Run folders, and the groups of runs that differ only in their seed: what a report is made from."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.block_statistics import StreamMeasurement, read_line
from ..errors import UserError, in_a_line
from ..files.reading import parse_json, parse_yaml, read_text, read_yaml
from ..files.writing import dump_yaml, encodable
from ..metrics import METRICS
from ..output.colors import OKABE_ITO
from ..output.redact import public, without_place
from ..plan import steps_of
from ..run_folder.folder import CONFIG, RECIPES_FOLDER, require_run
from ..run_folder.records import diverged_at, metrics_text, read_label, read_summary
from ..settings.config import ABOUT_THE_RECIPE, MAY_CHANGE_ON_RESUME, OF_THE_DATA, OF_THE_LENGTH
from ..settings.overrides import read_recipe, to_plain

__all__ = [
    "BASELINE",
    "Group",
    "LINESTYLES",
    "LoadedRun",
    "OF_DATA_SIZE",
    "STEPS",
    "comparable",
    "group_runs",
    "load_run",
    "members",
    "varied_settings",
]

STEPS, BASELINE = "StepsNet", "baseline"
OF_DATA_SIZE = ("samples", "text", "images")  # keys of summary.json; each task has its own
_OF_THE_RESULT = (*OF_THE_DATA, *OF_THE_LENGTH)  # results of models that differ in these are not compared
LINESTYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class LoadedRun:
    """What a run folder holds; ``summary`` is empty while the run is unfinished."""

    folder: Path
    recipe_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    epochs: dict[int, dict[str, Any]]  # the lines of kind "epoch" by their epoch
    stream_at_epoch_ends: dict[int, StreamMeasurement]  # on the example batch, by epoch
    stream_at_updates: dict[int, StreamMeasurement]  # in training, by update
    started_as: str = ""  # its label in a comparison or a sweep, as in the summary
    diverged: int | None = None  # the update at which a number was not finite

    @property
    def seed(self) -> Any:
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def recipe_key(self) -> str:
        """What the seeds of one model have in common: settings, and the name and size of their data, or also the place
        of the data if a finished run records no size."""
        return f"{self.settings} {self.data_sizes or (self.data if self.summary else '')}"

    @property
    def settings(self) -> str:
        """The recipe without its seed, and without where its data lie: each seed may have its own copy of them."""
        without = MAY_CHANGE_ON_RESUME | {"seed", "earlier_epochs"}
        recipe = {key: value for key, value in self.config.items() if key not in without}
        recipe["data"] = without_place(self.data)
        return json.dumps(recipe, sort_keys=True, default=str)

    @property
    def data(self) -> str:
        return str(self.config.get("data"))

    @property
    def data_sizes(self) -> str:
        """The sizes that tell data of one name apart; empty if they are not recorded, as in an unfinished run."""
        sizes = {key: self.summary[key] for key in OF_DATA_SIZE if key in self.summary}
        return json.dumps(sizes, sort_keys=True) if sizes else ""

    @property
    def widths(self) -> list[int]:
        """One width per block; for an unfinished run, known from its first measurement of the stream on.

        A finished run of a plain timm model has none.
        """
        if "widths" in self.summary:
            return self.summary["widths"]
        measured = [*self.stream_at_epoch_ends.values(), *self.stream_at_updates.values()]
        return next((one.widths for one in measured), [])

    @property
    def blocks(self) -> int | None:
        """Number of blocks; None if it is not known. The summary of a plain timm model has it, but no widths."""
        return self.summary.get("blocks") or len(self.widths) or None

    def value(self, key: str) -> float | None:
        """The result of a finished run, or the latest value of an unfinished one."""
        if self.summary:  # if it lacks the value, as for one that was not finite, no earlier one stands in for it
            return self.summary.get("metrics", {}).get(key)
        latest = (self.epochs[epoch].get(key) for epoch in sorted(self.epochs, reverse=True))
        return next((value for value in latest if value is not None), None)


@dataclass(frozen=True)
class Group:
    """The runs of one recipe and model: its seeds."""

    label: str
    suffix: str  # distinguishes groups of the same label
    color: str
    linestyle: str
    runs: tuple[LoadedRun, ...]

    @property
    def name(self) -> str:
        return self.label + self.suffix

    @property
    def the(self) -> str:
        """The name within a sentence."""
        return f"the {self.name}" if self.label == BASELINE else self.name

    @property
    def the_label(self) -> str:
        """The label alone within a sentence."""
        return f"the {self.label}" if self.label == BASELINE else self.label

    @property
    def task(self) -> str:
        return str(self.runs[0].config.get("task", "classification"))

    @property
    def recipe(self) -> str:
        return str(self.runs[0].config.get("name"))

    @property
    def trained_on(self) -> tuple[Any, ...]:
        """What a result depends on besides the model: the task, the data, wherever they lie, the part that is used, and
        the passes over it."""
        config = self.runs[0].config
        of_data = without_place(self.runs[0].data), _data_sizes(self.runs)
        return (self.task, *of_data, *(config.get(key) for key in _OF_THE_RESULT[1:]))

    @property
    def counted(self) -> tuple[LoadedRun, ...]:
        """The finished runs, or all if none is: a mean over seeds must not jump at the epoch where a run stops."""
        return tuple(run for run in self.runs if run.summary) or self.runs

    @property
    def widths(self) -> list[int]:
        return next((run.widths for run in self.runs if run.widths), [])

    @property
    def blocks(self) -> int | None:
        return _num_blocks(self.runs)

    @property
    def steps(self) -> list[tuple[int, int]]:
        return steps_of(self.widths)

    def summary_value(self, key: str) -> Any:
        """A value of the first summary that has it, such as the number of parameters."""
        return next((run.summary[key] for run in self.runs if run.summary.get(key) is not None), None)

    def results(self, key: str) -> dict[Any, float]:
        """The final value of each seed among the finished runs; for a seed that was run twice, the mean."""
        found: dict[Any, list[float]] = {}
        for run in self.runs:
            value = run.value(key)
            if run.summary and value is not None and math.isfinite(value):
                found.setdefault(run.seed, []).append(value)
        return {seed: statistics.mean(values) for seed, values in found.items()}


def load_run(folder: Path) -> LoadedRun:
    """Read a run folder; a last line of metrics that a crash cut off is left out.

    Raises:
        UserError: the folder holds no run, or a line of its metrics is not JSON.
    """
    require_run(folder)
    config = _config_of(folder)
    of_grid = folder.parent / RECIPES_FOLDER / f"{folder.name}.yaml"
    if of_grid.exists():  # it knows where the data are now, unlike a seed that had ended before they were moved
        config["data"] = read_yaml(of_grid, "run").get("data")
    metrics = folder / "metrics.jsonl"
    lines = metrics_text(metrics)
    epochs: dict[int, dict[str, Any]] = {}
    stream: dict[str, dict[int, StreamMeasurement]] = {"epoch_end": {}, "update": {}}
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line, f"{metrics}, line {number}", allow_nan=True)
        except UserError:
            if number == len(lines):
                break
            raise
        try:
            # a resumed run may repeat an epoch: the later line counts
            if entry["kind"] == "epoch":
                epochs[int(entry["epoch"])] = _with_numbers(entry)
            elif measured := read_line(entry):
                stream[measured.at][measured.epoch if measured.at == "epoch_end" else measured.step] = measured
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            expected = "expected a line as a run writes it"
            raise UserError(f"{metrics}, line {number}: {in_a_line(error)}, {expected}") from None
    text = _public_text(folder / CONFIG)
    result = read_summary(folder) or {}
    at_ends, at_updates, label = stream["epoch_end"], stream["update"], read_label(folder)
    return LoadedRun(folder, text, config, result, epochs, at_ends, at_updates, label, diverged_at(folder))


def _public_text(file: Path) -> str:
    """A recipe for a page that is passed on: as it was written, unless something in it is of this machine."""
    text = read_text(file, "run")
    content = parse_yaml(text, f"run: cannot read {file}")
    cleaned = public(content)
    return text if cleaned == content else dump_yaml(cleaned)


def _config_of(folder: Path) -> dict[str, Any]:
    """A run's recipe as this version writes it, so that seeds of two versions compare; its modules are imported.

    If the recipe cannot be read, for example because its modules are no longer found, it is what the file says.
    """
    file = folder / CONFIG
    try:
        return to_plain(read_recipe(file))
    except UserError:
        return read_yaml(file, "run")


def _with_numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry. Raises ValueError for a metric that is not a number."""
    for key, value in entry.items():
        is_metric = key.endswith(tuple(f"_{name}" for name in METRICS))  # after the name of its split
        if is_metric and not isinstance(value, int | float | None):
            raise ValueError(f"got {key} {str(value)[:40]!r}")
    return entry


def group_runs(runs: Sequence[LoadedRun]) -> list[Group]:
    """Put the seeds of each model together, in the order given.

    An unfinished run that was started alone takes the label of a finished run of the same recipe and model. Data are
    the same if their kind, name and sizes are, wherever they lie, as in a folder of each job's own; but if one seed was
    trained on two copies, these are taken for two data sets, such as folds. An unfinished run records no sizes yet.
    """
    own = [run.summary.get("label") or run.started_as for run in runs]
    labels = {run.settings: label for run, label in zip(runs, own) if label}
    names = [
        encodable(str(label or labels.get(run.settings) or run.config.get("name") or run.folder.name))
        for run, label in zip(runs, own)
    ]
    ended: dict[tuple[str, str], str] = {}  # the recipe and data of the first run that has ended
    for name, run in zip(names, runs):
        if run.summary:
            ended.setdefault((name, run.settings), run.recipe_key)
    found: dict[tuple[str, str], list[LoadedRun]] = {}  # by label, and by recipe and data
    for name, run in zip(names, runs):
        key = run.recipe_key if run.summary else ended.get((name, run.settings), run.recipe_key)
        if any(other.seed == run.seed and other.data != run.data for other in found.get((name, key), ())):
            key += f" {run.data}"
        found.setdefault((name, key), []).append(run)
    order = list(dict.fromkeys([STEPS, BASELINE, *(label for label, _ in found)]))  # these two keep their colors
    groups: list[Group] = []
    for ((label, _), runs_of_group), suffix in zip(found.items(), _suffixes(found)):
        color = OKABE_ITO[order.index(label) % len(OKABE_ITO)]
        linestyle = LINESTYLES[sum(group.label == label for group in groups) % len(LINESTYLES)]
        groups.append(Group(label, encodable(suffix), color, linestyle, tuple(runs_of_group)))
    return groups


def comparable(groups: Sequence[Group]) -> bool:
    """Whether their results are from one data set and one length of training."""
    return len({group.trained_on for group in groups}) < 2


def varied_settings(groups: Sequence[Group]) -> list[str]:
    """The settings in which the groups differ besides their models."""
    of_the_pair = {"model", "baseline", "baseline_init", "baseline_backbone"}  # each run has its own as init, backbone
    besides = of_the_pair | ABOUT_THE_RECIPE | MAY_CHANGE_ON_RESUME | {"seed", "earlier_epochs"}
    return _varied(_recipes([group.runs for group in groups]), besides)


def _recipes(groups: Sequence[Sequence[LoadedRun]]) -> list[dict[str, Any]]:
    """The recipe of each group, with the name of its data, wherever they lie; numbered if data of one name have several
    sizes."""
    recipes = [runs[0].config | {"data": without_place(runs[0].data)} for runs in groups]
    sizes = [_data_sizes(runs) for runs in groups]
    parts = [json.dumps([recipe.get(key) for key in ("task", *OF_THE_DATA)]) for recipe in recipes]
    for recipe, part, size in zip(recipes, parts, sizes):
        of_part = list(dict.fromkeys(other for of, other in zip(parts, sizes) if of == part and other))
        if len(of_part) > 1 and size:
            recipe["data"] += f" ({of_part.index(size) + 1})"
    return recipes


def _data_sizes(runs: Sequence[LoadedRun]) -> str:
    """The data sizes of the first run that records them."""
    return next((run.data_sizes for run in runs if run.data_sizes), "")


def _varied(recipes: Sequence[dict[str, Any]], besides: Iterable[str]) -> list[str]:
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in besides)
    return [key for key in keys if len({str(recipe.get(key)) for recipe in recipes}) > 1]


def _suffixes(found: dict[tuple[str, str], list[LoadedRun]]) -> list[str]:
    """Return suffixes for the labels of the groups, so that no two names are equal: the first kind that does it."""
    recipes = _recipes(list(found.values()))
    varied = _varied(recipes, ("model", "baseline", "seed"))
    of_result = [key for key in varied if key in _OF_THE_RESULT]  # a depth would hide them
    numbers = [f" · {number}" for number in range(1, len(found) + 1)]
    for suffixes in (
        [""] * len(found),
        [_said(recipe, of_result) for recipe in recipes],
        [f" · {blocks} blocks" if blocks else "" for blocks in map(_num_blocks, found.values())],
        [f" · {recipe.get('name')}" for recipe in recipes],
        [_said(recipe, varied) for recipe in recipes],
        [f" · {runs[0].folder.name}" for runs in found.values()],
    ):
        if len({label + suffix for (label, _), suffix in zip(found, suffixes)}) == len(found):
            return suffixes
    return numbers


def _said(recipe: dict[str, Any], keys: Sequence[str]) -> str:
    """Describe these settings, as far as the recipe has them, without places on this machine."""
    said = ", ".join(f"{key} {public(recipe[key])}" for key in keys if key in recipe)
    return f" · {said}" if said else ""


def _num_blocks(runs: Sequence[LoadedRun]) -> int | None:
    return next((run.blocks for run in runs if run.blocks), None)


def members(groups: Sequence[Group]) -> list[tuple[Group, LoadedRun]]:
    """Every run with its group."""
    return [(group, run) for group in groups for run in group.runs]
