"""What a page shows besides figures: metrics of each class, examples of what the models do, notes on the data."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..metrics import find_metric
from ..run_folder.inspection import Confusion, Picture, Section, read_inspection
from .load_runs import Group, LoadedRun, members
from .words import join, mean_std

__all__ = ["class_table", "data_notes", "examples", "picture_source"]

_LONG = 30  # rows; a longer table is folded


def class_table(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Each metric of each class, mean over seeds, side by side for all models; None if no run has any."""
    columns: list[tuple[str, dict[str, str]]] = []  # heading, and the cell of each class
    keys = dict.fromkeys(key for _, run in members(groups) for key in _by_class(run))
    for key in keys:
        heading = find_metric(key.removeprefix("class_")).axis_label
        first, *others = (by_class[key] for _, run in members(groups) if key in (by_class := _by_class(run)))
        if all(other == first for other in others):  # such as the number of objects
            columns.append((heading, _cells(key, [first])))
            continue
        for group in groups:
            found = [by_class[key] for run in group.runs if key in (by_class := _by_class(run))]
            columns += [(f"{heading}, {group.name}", _cells(key, found))] if found else []
    if not columns:
        return None
    classes = dict.fromkeys(name for _, cells in columns for name in cells)
    rows = [[name, *(cells.get(name, "—") for _, cells in columns)] for name in classes]
    return {"columns": ["class", *(heading for heading, _ in columns)], "rows": rows, "is_long": len(rows) > _LONG}


def _by_class(run: LoadedRun) -> dict[str, Mapping[str, float | None]]:
    """What a summary says of each class, by its key, such as ``class_iou``."""
    return {
        key: value
        for key, value in run.summary.items()
        if key.startswith("class_") and isinstance(value, dict) and value
    }


def _cells(key: str, of_runs: Sequence[Mapping[str, float | None]]) -> dict[str, str]:
    """The mean over runs for each class, without the unit, which the heading has."""
    metric = dataclasses.replace(find_metric(key.removeprefix("class_")), unit="")
    values = {name: [value for run in of_runs if (value := run.get(name)) is not None] for name in of_runs[0]}
    return {name: (mean_std(of_class, metric) if of_class else "—") for name, of_class in values.items()}


def examples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The sections that runs have recorded, by heading; for each model, those of its first seed."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for group in groups:
        for run, section in _first_recorded(group):
            if isinstance(section, Confusion):  # drawn as a figure
                continue
            entry = {"kind": section.kind, "heading": section.heading, "about": section.about, "models": []}
            found.setdefault((section.kind, section.heading), entry)["models"].append((group, run, section))
    return list(found.values())


def _first_recorded(group: Group) -> list[tuple[LoadedRun, Section]]:
    for run in group.runs:
        if sections := read_inspection(run.folder):
            return [(run, section) for section in sections]
    return []


def picture_source(picture: Picture) -> str:
    """The picture as a data URL for an ``img``, so that the page loads nothing."""
    return f"data:{picture.mime};base64,{base64.b64encode(picture.content).decode()}"


def data_notes(groups: Sequence[Group]) -> list[str]:
    """What was left out of the data or cut, in sentences; with the run's name if not all runs say the same."""
    runs = [(group, run) for group, run in members(groups) if run.summary]
    said: dict[str, list[str]] = {}
    for group, run in runs:
        for note in _notes_of(run.summary):
            said.setdefault(note, []).append(f"{group.name}, seed {run.seed}")
    return [note if len(names) == len(runs) else f"{note} ({join(names)})" for note, names in said.items()]


def _notes_of(summary: Mapping[str, Any]) -> list[str]:
    notes = [
        f"{one.get('done', 'left out')}: {one['count']} of {one['total']} {one['what']} of {one['file']}, "
        f"such as {one['first']}"
        for one in summary.get("left_out", [])
    ]
    if count := summary.get("undecodable"):
        notes.append(f"images that training or evaluation read but could not decode: {count}")
    if count := summary.get("unlabelled"):
        notes.append(f"annotations without a labelled pixel, which give no loss: {count}")
    return notes
