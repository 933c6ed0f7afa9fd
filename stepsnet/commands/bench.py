"""`stepsnet bench`: speed and memory of any models side by side, and the figures of Fig. 6."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.writing import dump_json
from ..output.terminal import say
from .options import add_json_option, integers, whole

HELP = "measure the speed and memory of models side by side (Fig. 6)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a timm or StepsNet name, table:5b for a table's rows, a run folder or its summary.json",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where speed.json and the figures are written")
    parser.add_argument("--force", action="store_true", help="replace earlier results in --out")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="samples per forward pass (default: 32)")
    parser.add_argument("--rounds", type=whole(1), default=10, help="timings of each model (default: 10)")
    parser.add_argument(
        "--memory",
        metavar="B,B",
        type=integers,
        default=[32, 64],
        help="two batch sizes at which memory is measured (default: 32,64); 0: not measured",
    )
    parser.add_argument("--no-train", action="store_true", help="inference only")
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: an accelerator if there is one)")
    parser.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--compile", action="store_true", help="compile the models, as stepsnet.optimize does")
    parser.add_argument(
        "--runtime",
        metavar="R,R",
        default="torch",
        help="any of torch, onnxruntime and openvino, side by side in inference (default: torch)",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..output.console import Lines

    memory = tuple(options.memory) if any(options.memory) else None
    if memory and (len(memory) != 2 or not 0 < memory[0] < memory[1]):
        given = ",".join(map(str, memory))
        raise UserError(f"--memory: got {given}, expected two increasing batch sizes, such as 32,64, or 0")
    from ..bench import bench, find_candidates, keep_bench, render_bench, write_bench

    names = ("batch_size", "rounds", "device", "amp_dtype", "compile")
    settings = {name: getattr(options, name) for name in names}
    if options.out:
        from ..files.writing import require_new, require_writable_folder
        from ..report.speed import FILES

        require_writable_folder(options.out, "--out")
        require_new([options.out / name for name in ("speed.json", *FILES)], options.force)
    candidates = find_candidates(options.models)
    so_far: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        so_far[:] = [found]
        if options.out:
            keep_bench(options.out, found)

    def show(found: dict[str, Any]) -> None:
        say(dump_json(found) if options.json else render_bench(found))

    try:
        with Lines(sys.stderr) as lines:

            def note(text: str) -> None:
                for kind in ("note", "phase"):  # printed at once, and again if the work takes long
                    lines.show({"run": "bench", "kind": kind, "text": text})

            result = bench(
                candidates,
                memory_batches=memory,
                train=not options.no_train,
                runtimes=options.runtime.split(","),
                note=note,
                keep=keep,
                **settings,
            )
    except UserError:  # such as too little memory, after the speed has been measured
        for found in so_far:
            show(found)
        raise
    try:
        if options.out:
            write_bench(result, options.out)
    finally:  # such costly results are shown even if writing them failed, and written before showing them can fail
        show(result)
