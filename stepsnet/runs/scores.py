"""The scores of several runs, such as those of a comparison, and of their models over the seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..output.summary_stats import mean_and_std
from ..report.load_runs import BASELINE, group_runs, load_run, members
from ..report.words import pairs, summarize_results
from ..run_folder.folder import how_far
from ..tasks.splits import split_of
from .evaluate import evaluate_run

__all__ = ["Scores", "evaluate_runs"]

BySeed = dict[Any, float]


@dataclass(frozen=True)
class Scores:
    """What ``stepsnet eval --json`` prints for a comparison or a sweep."""

    runs: list[dict[str, Any]]  # run, model, seed and metrics; for an unfinished one also where it "stopped"
    models: list[dict[str, Any]]  # model, the seeds that have ended, mean and standard deviation of each metric
    differences: list[dict[str, Any]]  # the same for StepsNet minus baseline, paired over the seeds that both have
    summary: str  # in a sentence


def evaluate_runs(folders: Sequence[Path], data: str | None = None, overrides: Sequence[str] = ()) -> Scores:
    """Score each run, and compare the models as a report does, by the runs that have ended.

    Raises UserError as :func:`.evaluate.evaluate_run` does, and for runs of several splits.
    """
    runs = [load_run(folder) for folder in folders]
    split, *others = dict.fromkeys(split_of(data or str(run.config["data"]))[1] for run in runs)
    if others:
        got = f"got runs of the splits {', '.join([split, *others])}"
        raise UserError(f"eval: {got}, expected one split for all (--data names one)")
    scored, of_folder = [], {}
    for run in runs:
        of_folder[run.folder] = metrics = evaluate_run(run.folder, data, overrides)
        named = {f"{split}_{name}": value for name, value in metrics.items()}
        # without a summary, a run counts as unfinished; no metric from its training stands in for a score
        summary = run.summary and {**run.summary, "metrics": named}
        scored.append(dataclasses.replace(run, summary=summary, epochs={}))
    groups = sorted(group_runs(scored), key=lambda group: group.label == BASELINE)  # as `compare` has them
    prefix = f"{split}_"
    results = {
        group.name: {name: group.results(prefix + name) for name in of_folder[group.runs[0].folder]} for group in groups
    }
    of_runs = [
        {
            "run": run.folder.name,
            "model": group.name,
            "seed": run.seed,
            "metrics": of_folder[run.folder],
            **({} if run.summary else {"stopped": how_far(run.folder) or "not finished"}),
        }
        for group, run in members(groups)
    ]
    of_models = [_over_seeds(group.name, results[group.name]) for group in groups]
    differences = [
        _over_seeds(f"{steps.name} minus {base.name}", _differences(results[steps.name], results[base.name]))
        for steps, base in pairs(groups)
    ]
    in_words = summarize_results(groups, split)[0].replace("\u00a0", " ")
    return Scores(of_runs, of_models, [row for row in differences if row["seeds"]], in_words)


def _differences(one: dict[str, BySeed], other: dict[str, BySeed]) -> dict[str, BySeed]:
    return {
        name: {seed: value - other[name][seed] for seed, value in values.items() if seed in other[name]}
        for name, values in one.items()
        if name in other
    }


def _over_seeds(model: str, results: dict[str, BySeed]) -> dict[str, Any]:
    seeds = list(next(iter(results.values()), {}))
    metrics = {name: mean_and_std(list(values.values())) for name, values in results.items() if values}
    return {"model": model, "seeds": seeds, "metrics": metrics}
