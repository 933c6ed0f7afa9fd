"""`stepsnet plan`: the widths and depths of a StepsNet, or the memory that its training takes."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..errors import UserError
from ..markdown import markdown_table
from ..terminal import say

if TYPE_CHECKING:
    from ..plan import StepPlan

HELP = "plan the widths and depths of a StepsNet"
_MEMORY_SETTINGS = (
    "batch_size",
    "devices",
    "accumulation_steps",
    "shard",
    "average",
    "grad_checkpointing",
    "amp_dtype",
)
_WIDTH_SETTINGS = ("width", "depth", "steps", "profile", "blocks", "gmacs", "head_dim", "round_to", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, help="width of the residual network")
    parser.add_argument("--depth", type=int, help="its number of blocks")
    parser.add_argument("--steps", type=int, default=3, help="number of steps (default: 3)")
    parser.add_argument(
        "--profile",
        choices=("steps", "reverse", "bowtie"),
        default="steps",
        help="narrow to wide (default), wide to narrow, or wide to narrow and back",
    )
    parser.add_argument("--blocks", type=int, help="total number of blocks to reach at the same compute")
    parser.add_argument("--gmacs", type=float, help="compute of all blocks, in 10⁹ multiply-accumulates")
    parser.add_argument("--head-dim", type=int, default=64, help="attention head size to stay near to (default: 64)")
    parser.add_argument("--round-to", default="heads", help="'heads' as the paper, or a multiple such as 8 or 64")
    parser.add_argument("--tokens", type=int, default=197, help="sequence length (default: 197, DeiT at 224)")
    parser.add_argument("--memory", action="store_true", help="predict what training takes on each device instead")
    parser.add_argument("--model", metavar="NAME", help="with --memory: a timm or StepsNet model")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples per update, over all devices")
    parser.add_argument("--devices", type=int, default=1, help="devices that share the batch (default: 1)")
    parser.add_argument("--accumulation-steps", type=int, default=1, help="parts that each goes through (default: 1)")
    parser.add_argument("--shard", action="store_true", help="show FSDP, which divides the weights too, beside DDP")
    parser.add_argument("--average", action="store_true", help="with an average of the weights (ema_decay)")
    parser.add_argument("--grad-checkpointing", type=float, default=0.0, help="share of the blocks that is recomputed")
    parser.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    others, place = (_WIDTH_SETTINGS, "without") if options.memory else (_MEMORY_SETTINGS, "with")
    for name in others:
        if getattr(options, name) != parser.get_default(name):
            got = f"--{name.replace('_', '-')} {'with' if options.memory else 'without'} --memory"
            raise UserError(f"plan: got {got}, expected it {place} --memory")
    if options.memory and options.model:
        _plan_memory(options)
    elif options.memory or options.model or options.width is None or options.depth is None:
        raise UserError("plan: expected --width and --depth, or --memory and --model")
    else:
        _plan_widths(options)


def _plan_widths(options: argparse.Namespace) -> None:
    from ..plan import plan_steps

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
        say(json.dumps({name: p.as_dict(options.tokens) for name, p in (("plan", plan), ("one_step", base))}))
    else:
        say(_render_plan(plan, base, options.tokens))


def _plan_memory(options: argparse.Namespace) -> None:
    from ..analysis.memory import plan_memory, render_memory

    plan = plan_memory(options.model, **{name: getattr(options, name) for name in _MEMORY_SETTINGS})
    say(json.dumps(plan) if options.json else render_memory(plan))


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
