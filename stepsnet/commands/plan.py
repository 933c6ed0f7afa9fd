"""`stepsnet plan`: the widths and depths of a StepsNet."""

from __future__ import annotations

import argparse
from typing import get_args

from ..errors import UserError
from ..files.writing import dump_json
from ..output.markdown import markdown_table
from ..output.terminal import say
from ..plan import Profile, StepPlan, plan_steps
from .options import add_json_option

HELP = "plan the widths and depths of a StepsNet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, required=True, help="width of the residual network")
    parser.add_argument("--depth", type=int, required=True, help="number of blocks of the residual network")
    parser.add_argument("--steps", type=int, default=3, help="number of steps (default: 3)")
    parser.add_argument(
        "--profile",
        choices=get_args(Profile),
        default="steps",
        help="narrow to wide (default), wide to narrow, or wide to narrow and back",
    )
    parser.add_argument("--blocks", type=int, help="total number of blocks to reach at the same compute")
    parser.add_argument(
        "--gmacs",
        type=float,
        help="compute of all blocks, in 10⁹ multiply-accumulates (default: the residual network's)",
    )
    parser.add_argument("--head-dim", type=int, default=64, help="attention head size to stay close to (default: 64)")
    parser.add_argument(
        "--round-to",
        default="heads",
        help="round widths to a multiple, such as 8 or 64 (default: heads, as the paper does)",
    )
    parser.add_argument("--tokens", type=int, default=197, help="sequence length (default: 197, DeiT at 224)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    round_to = options.round_to
    if round_to != "heads":
        if not round_to.isdecimal():
            raise UserError(f"--round-to: got {round_to!r}, expected 'heads' or a positive integer")
        round_to = int(round_to)
    macs = None if options.gmacs is None else options.gmacs * 1e9
    shared = {"head_dim": options.head_dim, "tokens": options.tokens}
    budget = {"blocks": options.blocks, "macs": macs}
    try:
        base = plan_steps(options.width, options.depth, 1, **shared)
        plan = plan_steps(
            options.width, options.depth, options.steps, profile=options.profile, round_to=round_to, **budget, **shared
        )
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    if options.json:
        say(dump_json({name: p.as_dict(options.tokens) for name, p in (("plan", plan), ("one_step", base))}))
    else:
        say(_render_plan(plan, base, options.tokens))


def _render_plan(plan: StepPlan, base: StepPlan, tokens: int) -> str:
    """A plan as a Markdown table, one row per step, compared with its 1-step network."""
    headers = ["step", "width", "heads × size", "blocks", "layers", "params (M)", "MACs (G)"]

    def row(name: str, width, heads, blocks: int, params: float, macs: float) -> list:
        return [name, width, heads, blocks, 5 * blocks, f"{params / 1e6:.2f}", f"{macs / 1e9:.3f}"]

    rows = []
    steps = zip(plan.widths, plan.num_heads, plan.head_dims, plan.depths, plan.step_params, plan.step_macs(tokens))
    for number, (width, heads, size, depth, params, macs) in enumerate(steps, 1):
        rows.append(row(f"F_{number}", width, f"{heads} × {size}", depth, params, macs))
    rows.append(row("all steps", max(plan.widths), "", plan.blocks, plan.params, plan.macs(tokens)))
    rows.append(row(f"1 step, {base}", base.widths[0], "", base.blocks, base.params, base.macs(tokens)))
    ratios = [
        f"{plan.blocks / base.blocks:.2f}×",
        f"{plan.layers / base.layers:.2f}×",
        f"{plan.params / base.params:.3f}×",
        f"{plan.macs(tokens) / base.macs(tokens):.3f}×",
    ]
    rows.append(["ratio", "", "", *ratios])
    title = f"{plan}    (blocks alone, {tokens} tokens; MACs are multiply-accumulates)"
    return f"{title}\n\n{markdown_table(headers, rows, 'lrrrrrr')}"
