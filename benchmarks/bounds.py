"""What bounds a Steps model on a CPU: its operators, what the macro design adds to its blocks, compilation by depth.

    python benchmarks/bounds.py [--pairs NAME …] [--rounds 9] [--out FILE]

1. Shares of inference time by kind of operator, from torch's profiler. optimized.py measures how near the whole comes
   to the machine's matrix rate.
2. The same blocks in a StepsNet, and called one after another on streams of their own width: the difference is the
   macro design. The two take turns; ratios are between neighbouring measurements.
3. The processor time of the first call of 22 and of 482 layers that are compiled block by block, without inductor's
   caches, and the number of graphs. The two take turns.

One thread. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from optimized import CPU, PAIRS, inference, make_comparable, spec_of
from outcome import conclude, rounded_quartiles
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from stepsnet.models.blocks import step_sequences
from stepsnet.models.build import build_model, input_size_of
from stepsnet.models.compilation import compile_blocks

# kind -> parts of operators' names; the first kind that fits counts
KINDS = {
    "attention": ("scaled_dot_product", "softmax"),
    "products": ("addmm", "mm", "conv", "linear"),
    "norms": ("norm",),
    "activations": ("gelu", "relu", "clamp", "silu", "sigmoid"),
    "additions and scales": ("add", "mul", "sub"),
    "copies and layouts": ("copy", "cat", "clone", "contiguous", "roll", "index", "slice", "split", "empty", "resize"),
}


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "views and the rest")


def operators(name: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Shares of inference time by kind of operator."""
    spec = spec_of(name)
    torch.manual_seed(0)
    model = build_model(spec).eval()
    make_comparable(model)
    shape = input_size_of(spec, model)
    run = inference(model, torch.randn(batch_size, *shape), "float32")
    run()
    shares: dict[str, list[float]] = {}
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        times: dict[str, float] = {}
        for event in profiled.key_averages():
            kind = kind_of(event.key)
            times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
        for kind, spent in times.items():
            shares.setdefault(kind, []).append(spent / sum(times.values()))
    return {"model": name, "shares": {kind: rounded_quartiles(found, 3) for kind, found in sorted(shares.items())}}


def macro_design(name: str, rounds: int) -> dict[str, Any]:
    """Time of a StepsNet over that of its blocks alone, in inference and with a backward pass."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    (steps,) = step_sequences(model)
    networks: list[Any] = list(steps.networks)
    whole = torch.randn(2, 197, steps.width)
    own = [whole[..., :width].contiguous() for width in steps.widths]

    def with_design() -> list[Tensor]:
        return [steps(whole)]

    def alone() -> list[Tensor]:
        return [network(x) for network, x in zip(networks, own)]

    found = {}
    for kind in ("inference", "training"):
        turns = {"design": _run(with_design, kind), "alone": _run(alone, kind)}
        seconds = _in_turns(turns, rounds)
        found[kind] = rounded_quartiles([a / b for a, b in zip(seconds["design"], seconds["alone"])], 4)
    return {"model": name, "time_over_blocks_alone": found}


def _run(forward: Callable[[], list[Tensor]], kind: str) -> Callable[[], None]:
    def run() -> None:
        if kind == "inference":
            with torch.inference_mode():
                forward()
        else:
            torch.autograd.backward([y.sum() for y in forward()])

    return run


def _in_turns(turns: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {key: [] for key in turns}
    for run in turns.values():
        run()
    for turn in range(rounds):
        for key in list(turns) if turn % 2 else reversed(list(turns)):
            started = time.process_time()
            turns[key]()
            seconds[key].append(time.process_time() - started)
    return seconds


def compilation(rounds: int) -> list[dict[str, Any]]:
    """The first call of three steps compiled block by block, with few and with many blocks."""
    import torch._inductor.config as inductor_config

    depths = {22: (2, 1, 1), 482: (53, 27, 16)}  # layers -> blocks of each step
    seconds: dict[int, list[float]] = {layers: [] for layers in depths}
    graphs: dict[int, int] = {}
    for turn in range(1 + rounds):  # the first loads inductor, and is not counted
        for layers in list(depths) if turn % 2 else reversed(list(depths)):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model: nn.Module = timm.create_model(
                "steps_deit_tiny_patch16_224", img_size=32, widths=(24, 34, 48), depths=depths[layers]
            ).eval()
            compile_blocks(model)
            started = time.process_time()
            with torch.inference_mode(), inductor_config.patch(fx_graph_cache=False, compile_threads=1):
                model(torch.randn(2, 3, 32, 32, device=CPU))
            seconds[layers] += [time.process_time() - started] if turn else []
            graphs[layers] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ratio = [deep / shallow for deep, shallow in zip(seconds[482], seconds[22])]
    rows = [
        {"layers": layers, "seconds": rounded_quartiles(seconds[layers], 2), "graphs": graphs[layers], "widths": 3}
        for layers in depths
    ]
    return [{"rows": rows, "time_of_482_over_22_layers": rounded_quartiles(ratio, 3)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pairs", nargs="+", choices=[*PAIRS], default=["deit_tiny", "deit_small", "swin_tiny", "resnet50"]
    )
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compilations", type=int, default=3, help="of each depth")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for pair in options.pairs for name in PAIRS[pair]]
    result = {
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "threads": 1,
        "operators": [operators(name, options.batch_size, options.rounds) for name in names],
        "macro_design": [
            macro_design(name, options.rounds)
            for name in ("steps_deit_tiny_patch16_224", "steps_deit_small_patch16_224")
        ],
        "compilation": compilation(options.compilations),
    }
    conclude("bounds", result, options.out)


if __name__ == "__main__":
    main()
