"""`stepsnet models`: the models, their baselines and sizes; the designs of the residual stream and their costs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from ..files.writing import dump_json
from ..output.markdown import markdown_table
from ..output.terminal import say
from .options import add_import_option, add_json_option, import_modules

HELP = "list the models, their baselines and sizes; the designs of the residual stream and their costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_import_option(parser)
    add_json_option(parser)
    parser.add_argument(
        "--residual",
        nargs="*",
        metavar="NAME",
        help="list the designs of the residual stream, or only those named, with their costs in DeiT-S relative to the "
        "plain design",
    )


def run(options: argparse.Namespace) -> None:
    import_modules(options)
    if options.residual is not None:
        _show_designs(options.residual, options.json)
    else:
        _show_models(options.json)


def _show_models(as_json: bool) -> None:
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
    if as_json:
        say(dump_json(rows))
        return
    say("| model | baseline | blocks | layers | params (M) | MACs (G) |\n|---|---|---:|---:|---:|---:|")
    for row in rows:
        numbers = f"{row['blocks']} | {row['layers']} | {row['params'] / 1e6:.1f} | {row['macs'] / 1e9:.1f}"
        say(f"| {row['model']} | {row['baseline'] or '–'} | {numbers} |")


def _show_designs(names: Sequence[str], as_json: bool) -> None:
    """Show all designs and a StepsNet in each profile, or only the named designs."""
    from ..analysis.design_costs import design_costs, profile_costs
    from ..residual import DESIGNS

    asked = dict.fromkeys(names or DESIGNS)
    costs = [*design_costs(names=dict.fromkeys(("plain", *asked))), *([] if names else profile_costs())]
    plain, shown = costs[0], [cost for cost in costs if cost.name in asked or not names]
    if as_json:
        say(dump_json([dataclasses.asdict(cost) for cost in shown]))
        return
    rows = []
    for cost in shown:
        options = ", ".join(f"{key}={value}" for key, value in cost.options.items())
        more = [cost.params / plain.params - 1, cost.macs / plain.macs - 1]
        rows.append(
            [
                f"`{cost.name}`" if cost.name in DESIGNS else cost.name,
                cost.title,
                cost.source,
                options,
                "yes" if cost.starts_as_plain else "",
                str(cost.blocks),
                *(f"{share:+.1%}" for share in more),
                "–" if cost.traffic is None else f"{cost.traffic:.1f}",
                f"{cost.activations / plain.activations:.2f}",
            ]
        )
    headers = ["design", "what it is", "source", "options", "starts as plain", "blocks", "parameters", "MACs"]
    say(markdown_table([*headers, "traffic (C a block)", "activations (plain = 1)"], rows, "lllllrrrrr"))
