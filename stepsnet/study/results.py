"""A small JSON file per finished run, from which tables, figures and verdicts are made without the run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..analysis.block_statistics import StreamMeasurement
from ..config import ABOUT_THE_RECIPE, MAY_CHANGE_ON_RESUME, OF_THE_DATA, Recipe, adamw_defaults_in
from ..errors import UserError
from ..files import write_atomically
from ..reading import read_json
from ..redact import public_value, without_place
from ..report.load_runs import load_run
from ..run_folder import has_begun
from ..user_modules import is_module_version
from .declare import Cell, Study
from .run_plan import Planned

__all__ = [
    "OF_THE_MACHINE",
    "check_one_data_set",
    "defaults_of",
    "diverged_record",
    "flatness_of",
    "modules_of",
    "note_criteria",
    "noted_criteria",
    "read_results",
    "record_of",
    "settings_of",
    "write_record",
]

# of summary.json; the widths, one a block, are in the recipe
_OF_DATA_SIZE = ("samples", "text", "images")  # each task says it in its own way
_KEPT = ("seed", "epochs", "lr", "batch_size", "data", "split", *_OF_DATA_SIZE, "blocks", "layers", "params", "macs")
_KEPT_TOO = ("metrics", "seconds", "samples_per_second", "hardware", "versions", "commit", "trained_before")
_CURVE = (
    "epoch",
    "step",
    "train_loss",
    "train_top1",
    "train_mixed_top1",
    "train_clean_loss",
    "train_clean_top1",
    "val_loss",
    "val_top1",
)
# what the runs of a study may differ in; batch norm and Mixup see each part of a batch by itself
OF_THE_MACHINE = MAY_CHANGE_ON_RESUME - {"accumulation_steps", "compile", "log_interval", "max_undecodable"}
# of a record, to find its place
_NEEDED: dict[str, Any] = {"run": str, "contender": str, "point": int, "kind": str, "variant": str}
_NEEDED |= {"rate": (int, float), "seed": int, "settings": dict}
_IF_THERE: dict[str, Any] = {"metrics": dict, "curve": list, "hardware": dict, "versions": dict, "tuning": str}
_MEASUREMENTS = {"tuning": 1, "final": 4}  # of the residual stream that are kept, the first and the last among them


def read_results(folder: Path, study: Study) -> dict[str, dict[str, Any]]:
    """Records by the name of their run; what is no record of a run is left out.

    Raises:
        UserError: a file that cannot be read, that lacks what the record of a run has, is called after another run, or
            is of another study, whose runs may have the same names.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        record = read_json(file, "results")
        if isinstance(record, dict) and "study" in record and "run" in record:
            if record["study"] != study.name:
                raise UserError(
                    f"results: {file} is of the study {record['study']}, expected a folder for {study.name}"
                )
            for key, kind in (_NEEDED | _IF_THERE).items():
                if key in _IF_THERE and key not in record:
                    continue
                if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
                    got = f"{key} {str(record[key])[:40]!r}" if key in record else f"no {key}"
                    raise UserError(f"results: {file} has {got}, expected a file as a run of the study leaves it")
            if wrong := _wrong_in(record):
                raise UserError(f"results: {file} has {wrong}, expected a file as a run of the study leaves it")
            for key, value in record.get("metrics", {}).items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if not (is_number or value is None):
                    raise UserError(f"results: {file} has {key} {str(value)[:40]!r}, expected a number")
            for key in ("criteria", "claims", "sentences"):
                rules = record.get(key, [])
                if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
                    raise UserError(f"results: {file} has {key} {str(rules)[:40]!r}, expected a list of sentences")
            if file.stem != record["run"]:  # such as a copy beside it, of which only one would count
                raise UserError(f"results: {file} holds the record of {record['run']}, expected {record['run']}.json")
            record["settings"] |= dict.fromkeys(adamw_defaults_in(record["settings"]))  # of an older one
            found[record["run"]] = record
    return found


def _wrong_in(record: Mapping[str, Any]) -> str:
    """What is of another type inside of a record, or nothing."""
    for line in record.get("curve", []):
        if not isinstance(line, dict) or type(line.get("epoch")) is not int:
            return f"a curve with {str(line)[:40]!r}"
        for key, value in line.items():
            if not isinstance(value, int | float | None):
                return f"a curve with {key} {str(value)[:40]!r}"
    for key, texts in {"hardware": ("cpu",), "versions": record.get("versions", ())}.items():
        for name in texts:
            if name in record.get(key, {}) and not isinstance(record[key][name], str):
                return f"{key} with {name} {str(record[key][name])[:40]!r}"
    for key in ("blocks", "layers", "params", "macs"):
        if not isinstance(record.get(key), int | float | None):  # of a model whose blocks are not found, null
            return f"{key} {str(record[key])[:40]!r}"
    if not isinstance(record.get("commit"), str | None):
        return f"commit {record['commit']!r}"
    return "" if record["rate"] > 0 else f"rate {record['rate']}"


def check_one_data_set(records: Mapping[str, Mapping[str, Any]], data: str | None = None) -> None:
    """Raises UserError where runs were trained on data of several names, or of several sizes under equal settings.

    Args:
        data: what further runs are to be trained on.
    """
    expected = public_value(data) if data else None
    sizes: dict[str, tuple[Any, str]] = {}
    for run, record in records.items():
        if "data" not in record:  # of one that diverged
            continue
        expected = expected or record["data"]
        if without_place(record["data"]) != without_place(expected):
            raise UserError(f"results: {run} was trained on {record['data']}, expected one data set, {expected}")
        of_data = json.dumps([record["settings"].get(key) for key in OF_THE_DATA])
        size = {key: record[key] for key in _OF_DATA_SIZE if key in record}
        first, of = sizes.setdefault(of_data, (size, run))
        if size != first:
            raise UserError(f"results: {run} was trained on {size}, {of} on {first}, expected one data set")


def modules_of(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The user's modules that runs have imported: of each, its versions and how many runs record them."""
    found: dict[str, dict[str, int]] = {}
    for record in records:
        for name, version in record.get("versions", {}).items():
            if is_module_version(version):
                of_module = found.setdefault(name, {})
                of_module[version] = of_module.get(version, 0) + 1
    return found


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What a result depends on: the recipe without the fields that may differ from machine to machine."""
    left_out = OF_THE_MACHINE | ABOUT_THE_RECIPE | {"data", "baseline"}
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return {key: value for key, value in plain.items() if key not in left_out}


def defaults_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe of this kind that have a default, with it."""
    fields = type(recipe).__pydantic_fields__  # type: ignore[attr-defined]
    found = {}
    for name, field in fields.items():
        if not field.is_required():
            value: Any = field.get_default(call_default_factory=True)
            is_plain = isinstance(value, type) or not dataclasses.is_dataclass(value)
            found[name] = value if is_plain else dataclasses.asdict(value)
    return json.loads(json.dumps(found))


def record_of(study: Study, planned: Planned, recipe: Recipe, run: Path, command: str) -> dict[str, Any]:
    """The record of a run that has ended, from its folder.

    Args:
        command: that of the study, without folders of this machine.
    """
    loaded = load_run(run)
    needed = f"{study.tuned_on if planned.kind == 'tuning' else study.scored_on}_{study.metric}"
    if needed not in loaded.summary.get("metrics", {}):
        given = ", ".join(loaded.summary.get("metrics", {})) or "none"
        raise UserError(f"metric: {planned.name} has no {needed}, expected one of what it measured: {given}")
    keys = dict.fromkeys((*_CURVE, f"val_{study.metric}", study.flatness.key))
    curve = [{key: _short(line[key]) for key in keys if key in line} for line in loaded.epochs.values()]
    measured = loaded.stream_at_updates
    kept = [measured[step] for step in _spaced(sorted(measured), _MEASUREMENTS[planned.kind])]
    summary = {key: loaded.summary[key] for key in (*_KEPT, *_KEPT_TOO) if key in loaded.summary}
    if test := loaded.summary.get("test"):  # what the score is of: fewer images than there are, where some are damaged
        summary["test"] = {key: test[key] for key in (*_OF_DATA_SIZE, "undecodable") if key in test}
    return {
        **_head(study, planned, command),
        **summary,
        "settings": settings_of(recipe),
        "curve": curve,
        "stream": [{"step": one.step, **_per_block(one)} for one in kept],
    }


def diverged_record(study: Study, planned: Planned, recipe: Recipe, said: str, command: str) -> dict[str, Any]:
    """The record of a run that stopped because its loss was not finite. It counts as the worst result."""
    return {**_head(study, planned, command), "settings": settings_of(recipe), "diverged": public_value(said)}


def note_criteria(recipe: Path, run: Path, study: Study, cell: Cell) -> None:
    """Write beside the recipe of a final run its cell's tuning, and the criteria and the claims that it is started
    under, and how these are worded; once it has begun they stay."""
    if not has_begun(run):
        rules = {
            "tuning": study.tuning_of(cell),
            "criteria": study.rules_of(cell),
            "claims": study.claims_of(cell),
            "sentences": study.sentences_of(cell),
        }
        write_atomically(recipe.with_suffix(".criteria.json"), json.dumps(rules))


def noted_criteria(recipe: Path) -> dict[str, Any]:
    """The tuning, criteria and claims as the record of a final run has them; nothing for other runs."""
    noted = recipe.with_suffix(".criteria.json")
    rules = read_json(noted, "criteria") if noted.exists() else {}
    return {"criteria": rules} if isinstance(rules, list) else rules  # a list, of a run from before claims were noted


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    try:
        text = _text(record)
    except ValueError as error:  # a number that is not finite, with which nobody could read it
        raise UserError(f"results: {record['run']}: {error}") from None
    write_atomically(folder / f"{record['run']}.json", text)


def _text(record: Mapping[str, Any]) -> str:
    """JSON with one line per key, and one per entry of a list of mappings, so that differences can be read."""
    lines, dumps = [], partial(json.dumps, allow_nan=False)
    for key, value in record.items():
        nested = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(dumps, value)) + "\n ]" if nested else dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def flatness_of(study: Study, record: Mapping[str, Any]) -> float | None:
    """Relative change of the declared loss over the last share of a run; None where it is not known.

    It is that from where the last share begins to the run's end, as the studies declare it: what lies between is not
    looked at. Between evaluations the loss is taken to be linear.
    """
    flat = study.flatness
    points = [(line["epoch"], line[flat.key]) for line in record.get("curve", []) if line.get(flat.key) is not None]
    if len(points) < 2 or points[-1][0] != record.get("epochs", points[-1][0]):
        return None
    begin = points[-1][0] * (1 - flat.share)
    if begin < points[0][0]:
        return None
    for (left, before), (right, after) in pairwise(points):
        if left <= begin <= right:
            start = before + (after - before) * (begin - left) / (right - left)
            moved = abs(points[-1][1] - start)
            return moved / abs(start) if start else math.inf if moved else 0.0
    return None


def _head(study: Study, planned: Planned, command: str) -> dict[str, Any]:
    return {
        "study": study.name,
        "run": planned.name,
        "contender": planned.cell.contender,
        "point": planned.cell.point,
        "kind": planned.kind,
        "variant": planned.variant,
        "rate": planned.rate,
        "seed": planned.seed,
        "command": command,
    }


def _per_block(measured: StreamMeasurement) -> dict[str, list[float | None]]:
    """γ of the whole stream, γ of the part that is read, and the norm of the gradient, per block, to three digits."""
    kept = ("gamma", "gamma_read", "gradient")
    return {name: [float(f"{v:.3g}") if math.isfinite(v) else None for v in measured.values(name)] for name in kept}


def _spaced(steps: list[int], count: int) -> list[int]:
    """``count`` of the steps from the first to the last, about equally spaced on a logarithmic scale."""
    if count < 2 or len(steps) <= count:
        return steps[:count]
    wanted = [steps[0] * (steps[-1] / steps[0]) ** (i / (count - 1)) for i in range(count)]
    return sorted({min(steps, key=lambda step: abs(math.log(step / want))) for want in wanted})


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
