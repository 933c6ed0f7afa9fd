"""The records of a study's runs: read, and checked against its declaration and against each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.reading import read_json
from ..output.redact import public_value, without_place
from ..report.load_runs import OF_DATA_SIZE
from ..settings.config import OF_THE_DATA, adamw_defaults_in
from ..settings.user_modules import is_module_version
from .declare import Cell, Study
from .record import defaults_of, public_settings, settings_of
from .run_plan import Planned, choice_of, is_planned, recipe_of

__all__ = [
    "check_records",
    "check_results",
    "flatness_of",
    "modules_of",
    "read_record",
    "read_results",
]

# what a record must have, to find its place, and what it may have
_NEEDED: dict[str, Any] = {"run": str, "contender": str, "point": int, "kind": str, "variant": str}
_NEEDED |= {"rate": (int, float), "seed": int, "settings": dict}
_IF_THERE: dict[str, Any] = {"metrics": dict, "curve": list, "hardware": dict, "versions": dict, "tuning": str}
_IF_THERE |= {"trained_before": list}


def read_results(folder: Path, study: Study) -> dict[str, dict[str, Any]]:
    """Return records by the name of their run; files that are not records are left out.

    Raises:
        UserError: as :func:`read_record`.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        if record := read_record(file, study):
            found[record["run"]] = record
    return found


def read_record(file: Path, study: Study) -> dict[str, Any] | None:
    """Return the record in a file; None if the file is something else.

    Raises:
        UserError: the file cannot be read, lacks what the record of a run has, is named after another run, or belongs
            to another study, whose runs may have the same names.
    """
    record = read_json(file, "results")
    if not (isinstance(record, dict) and "study" in record and "run" in record):
        return None
    if record["study"] != study.name:
        raise UserError(f"results: {file} belongs to the study {record['study']}, expected results of {study.name}")
    for key, kind in (_NEEDED | _IF_THERE).items():
        if key in _IF_THERE and key not in record:
            continue
        if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
            got = f"{key} {str(record[key])[:40]!r}" if key in record else f"no {key}"
            raise UserError(f"results: {file} has {got}, expected a record as a run of the study writes it")
    if wrong := _wrong_in(record):
        raise UserError(f"results: {file} has {wrong}, expected a record as a run of the study writes it")
    for key, value in record.get("metrics", {}).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (is_number or value is None):
            raise UserError(f"results: {file} has {key} {str(value)[:40]!r}, expected a number")
    for key in ("criteria", "claims", "sentences"):
        rules = record.get(key, [])
        if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
            raise UserError(f"results: {file} has {key} {str(rules)[:40]!r}, expected a list of sentences")
    if file.stem != record["run"]:  # such as a copy: only one of the two would count
        raise UserError(f"results: {file} holds the record of {record['run']}, expected the name {record['run']}.json")
    record["settings"] |= dict.fromkeys(adamw_defaults_in(record["settings"]))  # older records state them
    return record


def _wrong_in(record: Mapping[str, Any]) -> str:
    """Describe what has a wrong type or value inside a record, or return an empty string."""
    for line in record.get("curve", []):
        if not isinstance(line, dict) or type(line.get("epoch")) is not int:
            return f"a curve with {str(line)[:40]!r}"
        for key, value in line.items():
            if not isinstance(value, int | float | None):
                return f"a curve with {key} {str(value)[:40]!r}"
    for part in (record, *record.get("trained_before", [])):
        if wrong := _wrong_in_provenance(part):
            return wrong
    for key in ("blocks", "layers", "params", "macs"):
        if not isinstance(record.get(key), int | float | None):  # null for a model whose blocks are not found
            return f"{key} {str(record[key])[:40]!r}"
    return "" if record["rate"] > 0 else f"rate {record['rate']}"


def _wrong_in_provenance(part: Any) -> str:
    """Describe what has a wrong type in the provenance of a run or a part of it, or return an empty string."""
    if not isinstance(part, dict):
        return f"trained_before with {str(part)[:40]!r}"
    for key, texts in {"hardware": ("cpu",), "versions": part.get("versions", ())}.items():
        of_key = part.get(key, {})
        if not isinstance(of_key, dict):
            return f"{key} {str(of_key)[:40]!r}"
        for name in texts:
            if name in of_key and not isinstance(of_key[name], str):
                return f"{key} with {name} {str(of_key[name])[:40]!r}"
    return "" if isinstance(part.get("commit"), str | None) else f"commit {part['commit']!r}"


def check_results(study: Study, results: Path, data: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the results in a folder and check them.

    Raises:
        UserError: a result cannot be read, or was made under other settings than the declaration's, on other data than
            the others or than ``data``, with another model than the others of its cell, or at a rate or with a seed
            that is not declared; or a final run was made under another tuning or at a rate that tuning has not chosen.
    """
    there = read_results(results, study)
    check_records(study, there, data)
    return there


def check_records(study: Study, there: Mapping[str, Mapping[str, Any]], data: str | None = None) -> None:
    """Check records that have been read. Raises UserError as :func:`check_results` does."""
    sizes: dict[tuple[Cell, str], tuple[str, Any]] = {}
    for name, record in there.items():
        if not any(str(cell) == f"{record['contender']}@{record['point']}" for cell in study.cells):
            raise UserError(f"results: {name} is of {record['contender']}@{record['point']}, which is not declared")
        variants = study.contender(record["contender"]).tried
        if record["variant"] not in variants:
            raise UserError(
                f"results: {name} is of the variant {record['variant']!r}, expected one of {list(variants)}"
            )
        cell = study.cell(f"{record['contender']}@{record['point']}", "results")
        run = Planned(cell, record["kind"], record["variant"], record["rate"], record["seed"])
        recipe = recipe_of(study, run)
        theirs = {**defaults_of(recipe), **record["settings"]}  # a record may be older than a setting
        ours, known = settings_of(recipe), public_settings(theirs)
        for key, value in public_settings(ours).items():
            if known.get(key, value) != value:
                raise UserError(
                    f"results: {name} was made with {key} {theirs[key]!r}, expected {ours[key]!r}, as the study says"
                )
        if run.name != name:
            raise UserError(f"results: {name} holds the record of {run.name}, expected its own")
        if not is_planned(study, run, there):
            raise UserError(
                f"results: {name} has a rate or seed that the study does not declare: a run that has a result "
                "cannot be left out"
            )
        now = study.tuning_of(cell)
        if (was := record.get("tuning", now)) != now:
            raise UserError(
                f"results: {name} was started under the tuning {was}, but the study now declares {now}: its test score "
                "is known, so another tuning needs a study of another name"
            )
        size = {key: record[key] for key in ("blocks", "params") if key in record}
        other, expected = sizes.setdefault((cell, run.variant), (name, size)) if size else (name, size)
        if size != expected:
            raise UserError(f"results: {name} has {size}, but {other} has {expected}, expected runs of one model")
        choice = choice_of(study, cell, there)
        if run.kind == "final" and choice and (run.variant, run.rate) != (choice.variant, choice.rate):
            chosen = f"{choice.variant} {choice.rate:g}".strip()
            raise UserError(
                f"results: {name} is not at {chosen}, which tuning has chosen: a run that has a result cannot be left "
                "out"
            )
    _check_one_data_set(there, data)


def _check_one_data_set(records: Mapping[str, Mapping[str, Any]], data: str | None = None) -> None:
    """Raises UserError if runs were trained on data of several names, or of several sizes under equal settings.

    Args:
        data: what further runs are to be trained on.
    """
    expected = public_value(data) if data else None
    sizes: dict[str, tuple[Any, str]] = {}
    for run, record in records.items():
        if "data" not in record:  # an older record of a run that diverged
            continue
        expected = expected or record["data"]
        if without_place(record["data"]) != without_place(expected):
            raise UserError(
                f"results: {run} was trained on {record['data']}, expected one data set for all, {expected}"
            )
        of_data = json.dumps([record["settings"].get(key) for key in OF_THE_DATA])
        size = {key: record[key] for key in OF_DATA_SIZE if key in record}
        if not size:  # the run diverged
            continue
        first, of = sizes.setdefault(of_data, (size, run))
        if size != first:
            raise UserError(f"results: {run} was trained on {size}, but {of} on {first}, expected one data set for all")


def modules_of(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[str, ...], int]]:
    """Return the user's modules that runs have imported: for each, its versions and how many runs used them.

    A run that went on after the module was changed has several versions, in order.
    """
    found: dict[str, dict[tuple[str, ...], int]] = {}
    for record in records:
        of_run: dict[str, list[str]] = {}
        for part in (*record.get("trained_before", []), record):
            for name, version in part.get("versions", {}).items():
                if is_module_version(version):
                    of_run.setdefault(name, []).append(version)
        for name, versions in of_run.items():
            of_module, in_order = found.setdefault(name, {}), tuple(version for version, _ in groupby(versions))
            of_module[in_order] = of_module.get(in_order, 0) + 1
    return found


def flatness_of(study: Study, record: Mapping[str, Any]) -> float | None:
    """Return the relative change of the declared loss over the last share of a run; None if it is not known.

    As the studies declare it, the loss at the run's end is compared with that where the last share begins; what lies
    between does not count. Between evaluations the loss is taken to be linear.
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
