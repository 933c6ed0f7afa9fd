"""`stepsnet eval`: score a run, or a checkpoint of any timm or StepsNet model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..summary_stats import format_mean_std, mean_and_std
from ..terminal import say
from .options import place, runs_inside, whole

if TYPE_CHECKING:
    from ..report.load_runs import Run

__all__ = ["Scores", "evaluate_runs", "render_scores"]

HELP = "score a run, or a checkpoint of any timm or StepsNet model, on a validation split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the folder of a run, a comparison or a sweep, or with --model a file of weights",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="how it is scored, such as eval_flip=true")
    parser.add_argument("--data", type=place, help="other data than the run's, such as folder:PATH")
    parser.add_argument("--model", metavar="NAME", help="the model that a file of weights is of")
    parser.add_argument("--stride", type=whole(1), help="of a language model: tokens scored in each window")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..console import working
    from ..metrics import find_metric, format_metric

    if options.model and not options.data:
        raise UserError("eval: --model needs --data, expected such as --data folder:PATH")
    if options.model and (options.overrides or options.stride is not None):
        got = " ".join([*options.overrides, *([] if options.stride is None else [f"--stride {options.stride}"])])
        raise UserError(f"eval: got {got} beside --model, expected them with the folder of a run alone")
    runs = [] if options.model else runs_inside(options.run)
    with working(f"scoring {options.run}"):
        from ..runs.evaluate import evaluate_checkpoint, evaluate_run  # takes seconds

        if options.model:
            metrics = evaluate_checkpoint(options.run, options.model, options.data)
        elif runs != [options.run]:
            scores = evaluate_runs(runs, options.data, options.stride, options.overrides)
        else:
            metrics = evaluate_run(options.run, options.data, options.stride, options.overrides)
    if runs not in ([], [options.run]):
        say(json.dumps(dataclasses.asdict(scores)) if options.json else render_scores(scores))
        return
    if options.json:
        say(json.dumps(metrics))
    else:
        say(", ".join(f"{find_metric(name).name} {format_metric(name, value)}" for name, value in metrics.items()))


@dataclass(frozen=True)
class Scores:
    """What ``--json`` has of a comparison or a sweep."""

    runs: list[dict[str, Any]]  # run, model, seed and metrics of each, and "stopped", where, of one that has not ended
    models: list[dict[str, Any]]  # model, the seeds that have ended, and of each metric mean and standard deviation
    differences: list[dict[str, Any]]  # the same of StepsNet minus baseline, paired over the seeds that both have
    summary: str  # in a sentence


def evaluate_runs(
    folders: Sequence[Path], data: str | None = None, stride: int | None = None, overrides: Sequence[str] = ()
) -> Scores:
    """Score each run, and compare the models as a report does, by the runs that have ended.

    Raises UserError, as ``evaluate_run``, and for runs of several splits.
    """
    from ..report.load_runs import BASELINE, group_runs, load_run, members
    from ..report.words import pairs, summarize_results
    from ..runs.evaluate import evaluate_run
    from ..tasks.splits import split_of

    runs = [load_run(folder) for folder in folders]
    split, *others = dict.fromkeys(split_of(data or str(run.config["data"]))[1] for run in runs)
    if others:
        raise UserError(f"eval: got runs of the splits {', '.join([split, *others])}, expected one split, as of --data")
    scored, of_folder = [], {}
    for run in runs:
        of_folder[run.folder] = metrics = evaluate_run(run.folder, data, stride, overrides)
        named = {f"{split}_{name}": value for name, value in metrics.items()}
        # without a summary, a run counts as unfinished; of the training, nothing stands in for a score
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
            **({} if run.summary else {"stopped": _progress(run)}),
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


def _progress(run: Run) -> str:
    """How far the weights of a run are that has not ended."""
    from ..checkpoint import latest
    from ..run_folder import read_run_recipe

    checkpoint, _ = latest(run.folder / "checkpoints")
    if checkpoint is None:
        return "not finished"
    updates = checkpoint.state["data"]["updates an epoch"] * read_run_recipe(run.folder).epochs
    done = f"after update {checkpoint.state['position']['step']} of {updates}"
    return done if run.diverged is None else f"{done}, diverged at {run.diverged}"


BySeed = dict[Any, float]


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


def render_scores(scores: Scores) -> str:
    """A Markdown table of all runs, of the models where there are several seeds, and of the differences."""
    from ..markdown import markdown_table
    from ..metrics import find_metric, format_metric

    names = list(dict.fromkeys(name for row in scores.runs for name in row["metrics"]))
    rows = [
        [
            f"{row['run']}, {row['stopped']}" if "stopped" in row else row["run"],
            *(
                format_metric(name, row["metrics"][name], unit=False) if name in row["metrics"] else "—"
                for name in names
            ),
        ]
        for row in scores.runs
    ]
    several = [row for row in scores.models if len(row["seeds"]) > 1]
    for row in (*several, *scores.differences):
        cells = [
            format_mean_std(row["metrics"][name]["values"], find_metric(name).spec) if name in row["metrics"] else "—"
            for name in names
        ]
        count = len(row["seeds"])
        rows.append([f"{row['model']}, {f'{count} seeds' if count > 1 else 'one seed'}", *cells])
    table = markdown_table(["run", *(find_metric(name).axis_label for name in names)], rows, "l" + "r" * len(names))
    return f"{table}\n\n{scores.summary}"
