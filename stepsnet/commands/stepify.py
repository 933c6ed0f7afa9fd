"""`stepsnet stepify`: a model as a StepsNet, and what it costs, before anything is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from ..errors import UserError
from ..files.writing import dump_json
from ..output.terminal import say
from ..plan import Profile
from .options import add_import_option, add_json_option, import_modules, integers, whole

if TYPE_CHECKING:
    from ..analysis.stepify_report import StepifyReport

HELP = "show a timm or transformers model as a StepsNet of about the same compute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a timm model, or transformers:FOLDER with a config.json")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="arguments of the model, such as img_size=64"
    )
    parser.add_argument("--steps", type=whole(1), help="number of steps (default: 3)")
    parser.add_argument("--profile", choices=get_args(Profile), help="order of the widths (default: steps)")
    parser.add_argument("--match", choices=("macs", "params"), help="the cost that stays the same (default: macs)")
    parser.add_argument("--blocks", type=whole(1), help="number of blocks of each container to reach at the same cost")
    parser.add_argument(
        "--stages", metavar="S,S,…", type=integers, help="stages of a hierarchical model to put in steps, from 1"
    )
    parser.add_argument("--widths", metavar="C,C,…", type=integers, help="widths of an explicit plan, with --depths")
    parser.add_argument("--depths", metavar="D,D,…", type=integers, help="blocks of each step")
    parser.add_argument("--heads", metavar="N,N,…", type=integers, help="attention heads of each step")
    parser.add_argument("--round-to", type=whole(1), help="round the widths to a multiple, such as 8 or 64")
    parser.add_argument(
        "--stream-scale", type=float, default=1.0, help="factor that scales the stream where it begins (default: 1)"
    )
    parser.add_argument(
        "--residual",
        metavar="DESIGN",
        default="plain",
        help="design of each step's stream, such as mhc (default: plain)",
    )
    parser.add_argument(
        "--residual-options",
        metavar="key=value",
        action="append",
        default=[],
        help="an option of the design, such as streams=4; may be repeated",
    )
    parser.add_argument(
        "--tokens", type=whole(1), default=256, help="sequence length at which compute is matched (default: 256)"
    )
    add_import_option(parser)
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..output.console import working

    import_modules(options)
    with working("building both models"):
        report = _describe(options)
    say(dump_json(report.as_dict()) if options.json else str(report))


def _describe(options: argparse.Namespace) -> StepifyReport:
    from ..analysis.stepify_report import describe_stepify
    from ..models.stepify import OPTIONS
    from ..settings.overrides import parse_assignments

    given = {key: getattr(options, key) for key in ("steps", "profile", "match", "blocks", "round_to")}
    if (options.widths or options.depths or options.heads) and any(given.values()):
        decided = next(key for key, value in given.items() if value)
        raise UserError(f"--{decided.replace('_', '-')}: got it beside a plan, expected --widths and --depths alone")
    args = parse_assignments(options.overrides, "model")
    if own := next((key for key in args if key in OPTIONS), None):
        option = {"plan": "--widths", "example": "--tokens"}.get(own, f"--{own.replace('_', '-')}")
        raise UserError(f"{own}: got it as an argument of the model, expected the option {option}")
    plan = {"widths": options.widths, "depths": options.depths, "num_heads": options.heads}
    return describe_stepify(
        options.name,
        options.steps or 3,
        profile=options.profile or "steps",
        match=options.match or "macs",
        blocks=options.blocks,
        stages=options.stages,
        plan={key: value for key, value in plan.items() if value} or None,
        round_to=options.round_to or "heads",
        stream_scale=options.stream_scale,
        residual=options.residual,
        residual_options=parse_assignments(options.residual_options, "residual_options"),
        tokens=options.tokens,
        **args,
    )
