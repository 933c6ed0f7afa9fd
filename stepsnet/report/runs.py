"""Run folders and their groups: what a report is made from."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

STEPS, BASELINE = "StepsNet", "baseline"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe-Ito, colour-blind safe
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Run:
    """What a run folder holds; ``summary`` is empty while the run is unfinished."""

    folder: Path
    recipe_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    epochs: dict[int, dict[str, Any]]  # the lines of kind "epoch" by their epoch
    ratios: dict[int, dict[str, Any]]  # those of kind "shortcut_ratio"
    signals: dict[int, dict[str, Any]]  # those of kind "measure_stream", by their update

    @property
    def seed(self) -> Any:
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def kind(self) -> str:
        """What the seeds of one model have in common: the rest of the recipe."""
        return json.dumps({k: v for k, v in self.config.items() if k != "seed"}, sort_keys=True, default=str)

    @property
    def widths(self) -> list[int]:
        """One width a block; known from the first measurement on."""
        return self.summary.get("widths") or next((line["widths"] for line in self.ratios.values()), [])

    @property
    def blocks(self) -> int | None:
        """Of a plain timm model the summary has them, and no widths; None where they are not known."""
        return self.summary.get("blocks") or len(self.widths) or None

    def value(self, key: str) -> float | None:
        """The result or, while there is none, the latest value."""
        latest = (self.epochs[epoch].get(key) for epoch in sorted(self.epochs, reverse=True))
        return self.summary.get("metrics", {}).get(key, next((v for v in latest if v is not None), None))


@dataclass(frozen=True)
class Group:
    """The runs of one recipe and model: its seeds."""

    label: str
    suffix: str  # tells apart groups of the same label
    colour: str
    dash: str
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.label + self.suffix

    @property
    def the(self) -> str:
        """The name within a sentence."""
        return f"the {self.name}" if self.label == BASELINE else self.name

    @property
    def counted(self) -> tuple[Run, ...]:
        """The finished runs (all, if none is), so that no mean over seeds jumps where one of them stops."""
        return tuple(run for run in self.runs if run.summary) or self.runs

    @property
    def widths(self) -> list[int]:
        return next((run.widths for run in self.runs if run.widths), [])

    @property
    def blocks(self) -> int | None:
        return _blocks(self.runs)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(width, blocks) of each stretch of blocks of equal width."""
        return [(width, len(list(blocks))) for width, blocks in groupby(self.widths)]

    def fact(self, key: str) -> Any:
        return next((run.summary[key] for run in self.runs if run.summary.get(key) is not None), None)

    def results(self, key: str) -> dict[Any, float]:
        """The final value by seed, of the finished runs; a seed that was run twice counts once, by its mean."""
        found: dict[Any, list[float]] = {}
        for run in self.runs:
            value = run.value(key)
            if run.summary and value is not None and math.isfinite(value):
                found.setdefault(run.seed, []).append(value)
        return {seed: statistics.mean(values) for seed, values in found.items()}


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these: each itself, or those within a comparison's or a sweep's."""
    found: list[Path] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
        found += inside or [folder]
    return found


def load_run(folder: Path) -> Run:
    """Read a run folder; a last line of metrics that a crash cut off is left out."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"run folder {folder}: no config.yaml in it, expected the output folder of a training run")
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else []
    kinds: dict[str, dict[int, dict[str, Any]]] = {"epoch": {}, "shortcut_ratio": {}, "stream_signal": {}}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{metrics}, line {number}: not JSON ({error})") from error
        if entry["kind"] in kinds:
            place = entry["step" if entry["kind"] == "stream_signal" else "epoch"]
            kinds[entry["kind"]][place] = entry  # of an epoch repeated by a resumed run, the later line
    result = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return Run(folder, text, yaml.safe_load(text) or {}, result, *kinds.values())


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put the seeds of each model together, in the order given.

    An unfinished run, which has no label yet, takes that of a finished run of the same recipe and model.
    """
    labels = {run.kind: run.summary["label"] for run in runs if run.summary.get("label")}
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        label = labels.get(run.kind) or run.config.get("label") or run.config.get("name") or run.folder.name
        kinds.setdefault((str(run.summary.get("label") or label), run.kind), []).append(run)
    recipes = [members[0].config for members in kinds.values()]
    varied = [
        key
        for key in recipes[0]
        if key not in ("model", "baseline", "seed") and len({str(r.get(key)) for r in recipes}) > 1
    ]
    for suffixes in (
        [""] * len(kinds),
        [f" · {blocks} blocks" if blocks else "" for blocks in map(_blocks, kinds.values())],
        [f" · {recipe.get('name')}" for recipe in recipes],
        [f" · {', '.join(f'{key} {recipe.get(key)}' for key in varied)}" for recipe in recipes],
        [f" · {members[0].folder.name}" for members in kinds.values()],
        [f" · {number}" for number in range(1, len(kinds) + 1)],
    ):
        if len({label + suffix for (label, _), suffix in zip(kinds, suffixes)}) == len(kinds):
            break
    order = list(dict.fromkeys([STEPS, BASELINE, *(label for label, _ in kinds)]))  # these two keep their colours
    groups: list[Group] = []
    for ((label, _), members), suffix in zip(kinds.items(), suffixes):
        colour = COLOURS[order.index(label) % len(COLOURS)]
        dash = DASHES[sum(group.label == label for group in groups) % len(DASHES)]
        groups.append(Group(label, suffix, colour, dash, tuple(members)))
    return groups


def _blocks(runs: Sequence[Run]) -> int | None:
    return next((run.blocks for run in runs if run.blocks), None)


def members(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    return [(group, run) for group in groups for run in group.runs]
