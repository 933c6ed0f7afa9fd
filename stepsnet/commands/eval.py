"""`stepsnet eval`: score a run, or a checkpoint of any timm or StepsNet model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UserError
from ..terminal import say

HELP = "score a run, or a checkpoint of any timm or StepsNet model, on a validation split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or with --model a file of weights")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="how it is scored, such as eval_flip=true")
    parser.add_argument("--data", help="other data than the run's, such as folder:PATH")
    parser.add_argument("--model", metavar="NAME", help="the model that a file of weights is of")
    parser.add_argument("--stride", type=int, help="of a language model: tokens scored in each window")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..console import working
    from ..metrics import find_metric, format_metric

    if options.model and not options.data:
        raise UserError("eval: --model needs --data, expected such as --data folder:PATH")
    with working(f"scoring {options.run}"):
        from ..runs.evaluate import evaluate_checkpoint, evaluate_run  # takes seconds

        if options.model:
            metrics = evaluate_checkpoint(options.run, options.model, options.data)
        else:
            metrics = evaluate_run(options.run, options.data, options.stride, options.overrides)
    if options.json:
        say(json.dumps(metrics))
    else:
        say(", ".join(f"{find_metric(name).name} {format_metric(name, value)}" for name, value in metrics.items()))
