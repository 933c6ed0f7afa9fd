"""`stepsnet eval`: score a run, or a checkpoint of any timm or StepsNet model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..files.writing import dump_json
from ..output.summary_stats import format_mean_std
from ..output.terminal import say
from .options import add_json_option, place, runs_inside, say_how_far, whole

if TYPE_CHECKING:
    from ..runs.scores import Scores

__all__ = ["render_scores"]

HELP = "score a run, or a checkpoint of any timm or StepsNet model, on a validation split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the folder of a run, of one of its checkpoints, of a comparison or a sweep, or with --model a file of "
        "weights",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="changes to how it is scored, such as eval_flip=true"
    )
    parser.add_argument("--data", type=place, help="data to use instead of the run's, such as folder:PATH")
    parser.add_argument("--model", metavar="NAME", help="with a file of weights: the model that they belong to")
    parser.add_argument("--stride", type=whole(1), help="for a language model: tokens scored in each window")
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..metrics import format_metric, metric_label
    from ..output.console import working

    if options.model and not options.data:
        raise UserError("eval: got --model without --data, expected --data too, such as --data folder:PATH")
    if options.model and (options.overrides or options.stride is not None):
        got = " ".join([*options.overrides, *([] if options.stride is None else [f"--stride {options.stride}"])])
        raise UserError(f"eval: got {got} with --model, expected it only with the folder of a run")
    runs = [] if options.model else runs_inside(options.run, or_checkpoint=True)
    overrides = [*options.overrides, *_stride(options.stride, runs)]
    with working(f"scoring {options.run}"):
        from ..runs.evaluate import evaluate_checkpoint, evaluate_run  # takes seconds

        if options.model:
            metrics = evaluate_checkpoint(options.run, options.model, options.data)
        elif runs != [options.run]:
            from ..runs.scores import evaluate_runs

            scores = evaluate_runs(runs, options.data, overrides)
        else:
            metrics = evaluate_run(options.run, options.data, overrides)
            say_how_far(options.run)
    if runs not in ([], [options.run]):
        say(dump_json(dataclasses.asdict(scores)) if options.json else render_scores(scores))
        return
    if options.json:
        say(dump_json(metrics))
    else:
        say(", ".join(f"{metric_label(name)} {format_metric(name, value)}" for name, value in metrics.items()))


def _stride(given: int | None, runs: Sequence[Path]) -> list[str]:
    """``--stride`` as an override. Raises UserError if a run is not that of a language model."""
    from ..run_folder.folder import read_run_recipe

    if given is None:
        return []
    for folder in runs:
        if not hasattr(recipe := read_run_recipe(folder), "seq_len"):
            raise UserError(f"--stride: {folder} is a run of {recipe.task}, expected one of language")
    return [f"eval_stride={given}"]


def render_scores(scores: Scores) -> str:
    """A Markdown table of all runs, of the models with several seeds and of the differences; below it, the summary."""
    from ..metrics import find_metric, format_metric, metric_label
    from ..output.markdown import markdown_table

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
    headers = ["run", *(metric_label(name, with_unit=True) for name in names)]
    table = markdown_table(headers, rows, "l" + "r" * len(names))
    return f"{table}\n\n{scores.summary}"
