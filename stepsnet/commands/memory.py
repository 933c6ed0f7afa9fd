"""`stepsnet memory`: the memory that training a model takes on each device, predicted without a device."""

from __future__ import annotations

import argparse

from ..files.writing import dump_json
from ..output.terminal import say
from .options import add_json_option

HELP = "predict the memory that training takes on each device"
_SETTINGS = ("batch_size", "devices", "accumulation_steps", "shard", "average", "grad_checkpointing", "amp_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="a timm or StepsNet model")
    parser.add_argument(
        "--batch-size", type=int, default=1024, help="samples per update, over all devices (default: 1024)"
    )
    parser.add_argument("--devices", type=int, default=1, help="devices that share the batch (default: 1)")
    parser.add_argument(
        "--accumulation-steps", type=int, default=1, help="forward passes per update on each device (default: 1)"
    )
    parser.add_argument("--shard", action="store_true", help="show FSDP, which divides the weights too, beside DDP")
    parser.add_argument("--average", action="store_true", help="include a moving average of the weights (ema_decay)")
    parser.add_argument(
        "--grad-checkpointing",
        type=float,
        default=0.0,
        help="share of the blocks that the backward pass recomputes (default: 0)",
    )
    parser.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..analysis.memory import plan_memory, render_memory

    plan = plan_memory(options.model, **{name: getattr(options, name) for name in _SETTINGS})
    say(dump_json(plan) if options.json else render_memory(plan))
