"""A small JSON file per finished run, from which tables, figures and verdicts are made without the run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..analysis.block_statistics import StreamMeasurement
from ..errors import UserError
from ..files.reading import read_json
from ..files.writing import write_atomically, write_new
from ..output.redact import public, public_value
from ..report.load_runs import OF_DATA_SIZE, load_run
from ..run_folder.provenance import provenance_of
from ..run_folder.resuming import can_go_on
from ..settings.config import ABOUT_THE_RECIPE, MAY_CHANGE_ON_RESUME, OF_THE_MODEL, Recipe
from .declare import Cell, Study
from .run_plan import Planned

__all__ = [
    "OF_THE_MACHINE",
    "defaults_of",
    "diverged_record",
    "note_criteria",
    "noted_criteria",
    "public_settings",
    "record_of",
    "settings_of",
    "write_record",
]

# keys of summary.json; the widths, one per block, are in the recipe
_KEPT = ("seed", "epochs", "lr", "batch_size", "data", "split", *OF_DATA_SIZE, "blocks", "layers", "params", "macs")
_KEPT_TOO = ("metrics", "seconds", "samples_per_second", "hardware", "versions", "commit", "ranks", "trained_before")
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
# settings in which runs of a study may differ, not accumulation: batch norm and Mixup see each part of a batch alone
OF_THE_MACHINE = MAY_CHANGE_ON_RESUME - {"accumulation_steps", "compile", "log_interval", "max_undecodable"}
_WEIGHTS = OF_THE_MODEL - {"model", "baseline"} | {"weights"}  # settings that name weights to start from
_MEASUREMENTS = {"tuning": 1, "final": 4}  # how many of the stream are kept: the first, and of several also the last


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What a result depends on: the recipe without the fields that may differ from machine to machine."""
    left_out = OF_THE_MACHINE | ABOUT_THE_RECIPE | {"data", "baseline"}
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return {key: value for key, value in plain.items() if key not in left_out}


def defaults_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of this kind of recipe that have a default, with their defaults."""
    fields = type(recipe).__pydantic_fields__  # type: ignore[attr-defined]
    found = {}
    for name, field in fields.items():
        if not field.is_required():
            value: Any = field.get_default(call_default_factory=True)
            is_plain = isinstance(value, type) or not dataclasses.is_dataclass(value)
            found[name] = value if is_plain else dataclasses.asdict(value)
    return json.loads(json.dumps(found))


def public_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without folders of this machine. Like data, weights to start from are given by name alone,
    wherever they lie; a run's weights file, which has the same name in every run, keeps the name of its folder."""

    def named(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: named(inner, of_key) for inner, of_key in value.items()}
        if key not in _WEIGHTS or not isinstance(value, str) or value.startswith("timm:"):
            return value
        *before, last = value.rstrip("/").split("/")
        return "/".join([*before[-1:], last] if last == "model.safetensors" else [last])

    return public(named("", settings))


def record_of(study: Study, planned: Planned, recipe: Recipe, run: Path, command: str) -> dict[str, Any]:
    """Return the record of a run that has ended, from its folder. A perplexity that was left out because it was not
    finite is recorded as None, and counts as the worst result.

    Args:
        command: that of the study, without folders of this machine.

    Raises:
        UserError: the run did not measure what it is to be chosen or scored by, or its folder cannot be read.
    """
    loaded = load_run(run)
    split, metrics = study.tuned_on if planned.kind == "tuning" else study.scored_on, loaded.summary.get("metrics", {})
    needed = f"{split}_{study.metric}"
    if needed not in metrics:
        is_scored = study.metric in vars(type(recipe)).get("scores", ())
        if not (is_scored and _is_worse_than_chance(loaded.summary, split)):
            given = ", ".join(metrics) or "none"
            raise UserError(f"metric: {planned.name} has no {needed}, expected one of its metrics: {given}")
        metrics = {**metrics, needed: None}
    keys = dict.fromkeys((*_CURVE, f"val_{study.metric}", study.flatness.key))
    curve = [{key: _short(line[key]) for key in keys if key in line} for line in loaded.epochs.values()]
    measured = loaded.stream_at_updates
    kept = [measured[step] for step in _spaced(sorted(measured), _MEASUREMENTS[planned.kind])]
    summary = {key: loaded.summary[key] for key in (*_KEPT, *_KEPT_TOO) if key in loaded.summary}
    if test := loaded.summary.get("test"):  # what the score covers: fewer images than there are, if some are damaged
        summary["test"] = {key: test[key] for key in (*OF_DATA_SIZE, "undecodable") if key in test}
    return {
        **_head(study, planned, command),
        **summary,
        "metrics": metrics,
        "settings": public_settings(settings_of(recipe)),
        "curve": curve,
        "stream": [{"step": one.step, **_per_block(one)} for one in kept],
    }


def _is_worse_than_chance(summary: Mapping[str, Any], split: str) -> bool:
    """Whether a language model predicts worse than one to which all tokens are equally likely: it is then the training,
    not the text, that made a perplexity too large."""
    loss, tokens = summary.get("metrics", {}).get(f"{split}_loss"), summary.get("vocab_size")
    return loss is not None and tokens is not None and loss > math.log(tokens)


def diverged_record(
    study: Study, planned: Planned, recipe: Recipe, run: Path, said: str, command: str
) -> dict[str, Any]:
    """The record of a run that stopped because one of its numbers was not finite. It counts as the worst result."""
    return {
        **_head(study, planned, command),
        "data": public_value(recipe.data),
        **provenance_of(run),
        "settings": public_settings(settings_of(recipe)),
        "diverged": public_value(said),
    }


def note_criteria(recipe: Path, run: Path, study: Study, cell: Cell) -> None:
    """Write beside a final run's recipe what it is started under: its cell's tuning, the criteria, and the claims and
    their wording. Once the run has begun, the file stays as it is."""
    if not can_go_on(run):
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
    return read_json(noted, "criteria") if noted.exists() else {}


def write_record(folder: Path, record: Mapping[str, Any]) -> bool:
    """Write a record; returns False if another sweep has already written one of this run, which stays."""
    try:
        text = _text(record)
    except ValueError as error:  # a number that is not finite would make the file unreadable
        raise UserError(f"results: {record['run']}: {error}") from None
    return write_new(folder / f"{record['run']}.json", text)


def _text(record: Mapping[str, Any]) -> str:
    """JSON with one line per key, and one per entry of a list of mappings, so that diffs are readable."""
    lines, dumps = [], partial(json.dumps, allow_nan=False)
    for key, value in record.items():
        nested = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(dumps, value)) + "\n ]" if nested else dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
    """Up to ``count`` of the steps from the first to the last, about equally spaced on a logarithmic scale."""
    if count < 2 or len(steps) <= count:
        return steps[:count]
    wanted = [steps[0] * (steps[-1] / steps[0]) ** (i / (count - 1)) for i in range(count)]
    return sorted({min(steps, key=lambda step: abs(math.log(step / want))) for want in wanted})


def _short(value: Any) -> Any:
    """Round to five digits; None for what JSON cannot represent, such as the perplexity of a bad start."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
