"""`stepsnet models`: the models, their baselines and sizes."""

from __future__ import annotations

import argparse
import json

from ..terminal import say

HELP = "list the models, their baselines and sizes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    import timm
    import torch

    from ..analysis.complexity import count_complexity
    from ..models import baseline_of, model_names

    rows = []
    for name in model_names():
        with torch.device("meta"):
            counts = count_complexity(timm.create_model(name))
        baseline = baseline_of(name) if name.startswith("steps_") else None
        rows.append({"model": name, "baseline": baseline, **vars(counts)})
    if options.json:
        say(json.dumps(rows))
        return
    say("| model | baseline | blocks | layers | params (M) | MACs (G) |\n|---|---|---:|---:|---:|---:|")
    for row in rows:
        numbers = f"{row['blocks']} | {row['layers']} | {row['params'] / 1e6:.1f} | {row['macs'] / 1e9:.1f}"
        say(f"| {row['model']} | {row['baseline'] or '–'} | {numbers} |")
