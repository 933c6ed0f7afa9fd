"""What each design of the residual stream takes of time beside the plain one, in a DeiT.

    python benchmarks/design_speed.py [--device cuda] [--width 192] [--blocks 12] [--batch 4] [--threads 1]
        [--rounds 9] [--designs NAME …] [--settings eager compiled] [--out FILE.json]

Inference and updates of AdamW on images of 224×224, in float32 on a CPU and in bfloat16 on CUDA. A design and the plain
network take turns; ratios are between neighbouring measurements. The StepsNet has the plain network's compute, and so
more blocks. The file is written after every design. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from device_speed import in_turn, inference, training
from outcome import conclude, record, rounded_quartiles
from torch import nn

from stepsnet.device import pick_device
from stepsnet.files.writing import write_atomically
from stepsnet.plan import plan_steps
from stepsnet.residual import DESIGNS, design_of

HEAD = 64
STEPS = "StepsNet"


def build(name: str, width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    plan = plan_steps(width, blocks, 3 if name == STEPS else 1, head_dim=HEAD)
    shape: dict[str, Any] = dict(widths=plan.widths, depths=plan.depths, num_heads=plan.num_heads)
    residual = "plain" if name == STEPS else name
    return timm.create_model("steps_deit_small_patch16_224", residual=residual, **shape).eval()


def prepared(model: nn.Module, kind: str, setting: str, batch: int, device: torch.device) -> Callable[[], Any]:
    x = torch.randn(batch, 3, 224, 224, device=device)
    reduced = device.type == "cuda"
    if kind == "training":
        return training(model, x, setting, "bfloat16" if reduced else "float32")
    if reduced:
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    return inference(model, x, setting)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--designs", nargs="+", default=[*DESIGNS, STEPS])
    parser.add_argument("--settings", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in options.designs if name != "plain"]
    for name in names:
        if name != STEPS:
            design_of(name)  # an unknown one is refused before anything is measured
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    model = {"width": options.width, "blocks": options.blocks, "batch_size": options.batch}
    rows: list[dict[str, Any]] = []
    result = {"device": str(device), "threads": options.threads, "rounds": options.rounds, **model, "rows": rows}
    origin = record("design_speed", {"device": str(device)})
    for name in names:
        row: dict[str, Any] = {"design": name}
        for setting in options.settings:
            for kind in ("training", "inference"):
                torch._dynamo.reset()
                started = time.perf_counter()
                runs = [
                    prepared(
                        build(each, options.width, options.blocks).to(device), kind, setting, options.batch, device
                    )
                    for each in (name, "plain")
                ]
                seconds = time.perf_counter() - started
                times, of_plain = in_turn(runs, options.rounds, device)
                row[f"{kind}, {setting}"] = {
                    "time_over_plain": rounded_quartiles([ours / theirs for ours, theirs in zip(times, of_plain)]),
                    "seconds": rounded_quartiles(times),
                    "seconds_to_prepare_both": round(seconds, 1),
                }
                del runs
                gc.collect()
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
        if options.out:
            write_atomically(options.out, json.dumps(origin | result, indent=1) + "\n")
    conclude("design_speed", result, options.out)


if __name__ == "__main__":
    main()
