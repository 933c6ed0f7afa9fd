"""Steps models against their baselines on one device, each at its best setting.

    python benchmarks/device_speed.py [--device cuda] [--quick] [--seconds 200] [--pairs NAME …] [--out FILE.json]

A pair's two models take turns under each setting, so that a change of clocks hits both alike; ratios are of
neighbours. Settings are eager, compiled (one block at a time, so that the blocks of a width share their graphs) and, on
CUDA, both as a replayed CUDA graph. Weights are bfloat16 on CUDA in inference; training is under autocast, with AdamW.
What a setting computes is held against the eager model. The file is written after every row. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, rounded_quartiles
from torch import Tensor, nn

from stepsnet.commands.bench import find_candidates
from stepsnet.config import ModelSpec
from stepsnet.device import autocast, pick_device
from stepsnet.files import write_atomically
from stepsnet.models.build import build_model, input_size_of
from stepsnet.models.compilation import compile_blocks

ROUNDS, QUICK_ROUNDS = 30, 3
TOKENS = 512


@dataclass(frozen=True)
class Pair:
    steps: str  # a model's name, or TABLE/ROW
    baseline: str
    batches: tuple[int, ...] = (1, 256)  # of inference
    training: int = 128
    settings: tuple[str, ...] = ("eager", "compiled", "eager graph", "compiled graph")  # those of a graph on CUDA alone


PAIRS = {
    "deit_small": Pair("steps_deit_small_patch16_224", "deit_small_patch16_224"),
    "485_layers": Pair("table:5b/Steps-Swin 96 blocks", "table:5b/Swin 96 blocks", (1, 128), 64),
    "resnet50": Pair("steps_resnet50", "resnet50"),
    "swin_tiny": Pair("steps_swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224"),
    "language_30M": Pair("table:4/Steps-Transformer 30M", "table:4/Transformer 30M", (1, 32), 16),
    "deit_tiny": Pair("steps_deit_tiny_patch16_224", "deit_tiny_patch16_224"),
    "482_layers": Pair("table:5a/Steps-DeiT 96 blocks", "table:5a/DeiT 96 blocks"),
}
QUICK = {
    "test_vit": Pair("test_steps_deit", "test_vit", (1, 2), 2),
    "test_swin": Pair("test_steps_swin", "test_steps_swin", (1,), 2, ("eager",)),
}


def spec_of(name: str) -> ModelSpec:
    table, slash, row = name.partition("/")
    if not slash:
        return ModelSpec(name)
    return next(found.spec for found in find_candidates([table]) if found.name == row)


def load(name: str, device: torch.device) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A model in eval mode on the device, and what makes a batch for it."""
    torch.manual_seed(0)
    spec = spec_of(name)
    model = build_model(spec).eval().to(device)
    if spec.name == "steps_transformer":
        return model, lambda size: torch.randint(spec.args["vocab_size"], (size, TOKENS), device=device)
    shape = input_size_of(spec, model)
    if "resnet" in spec.name:
        model = model.to(memory_format=torch.channels_last)
        return model, lambda size: torch.randn(size, *shape, device=device).to(memory_format=torch.channels_last)
    return model, lambda size: torch.randn(size, *shape, device=device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def logits_of(found: Any) -> Tensor:
    return getattr(found, "logits", found)


def inference(model: nn.Module, x: Tensor, settings: str) -> tuple[Callable[[], Any], Tensor]:
    """A forward pass under a setting, and its output."""
    if "compiled" in settings:
        model = copy.deepcopy(model)
        compile_blocks(model)
    kwargs = {"use_cache": False} if hasattr(model, "generate") else {}

    def run() -> Any:
        with torch.inference_mode():
            return logits_of(model(x, **kwargs))

    for _ in range(3):
        output = run()
    if "graph" not in settings:
        return run, output
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        output = logits_of(model(x, **kwargs))
    graph.replay()
    return graph.replay, output


def training(model: nn.Module, x: Tensor, settings: str, amp_dtype: str) -> Callable[[], Any]:
    """Updates under a setting."""
    model = copy.deepcopy(model).train()
    if "compiled" in settings:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        with autocast(amp_dtype, x.device):
            if hasattr(model, "generate"):
                loss = model(x, labels=x, use_cache=False).loss
            else:
                logits = model(x).float()
                loss = nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        run()
    return run


def in_turn(functions: list[Callable[[], Any]], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of each function in each round; a short one is repeated within a round."""
    repeats = max(1, min(20, int(0.05 / max(1e-5, seconds_of(functions[0], device)))))
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds):
        order = range(len(functions)) if turn % 2 else reversed(range(len(functions)))
        for index in order:

            def repeated(function: Callable[[], Any] = functions[index]) -> None:
                for _ in range(repeats):
                    function()

            times[index].append(seconds_of(repeated, device) / repeats)
    return times


def compare(names: tuple[str, str], kind: str, size: int, settings: str, device: torch.device, rounds: int) -> dict:
    """Both models under one setting: samples per second, and the ratio of neighbours."""
    reduced = device.type == "cuda"
    functions: list[Callable[[], Any]] = []
    errors = []
    started = time.perf_counter()
    for name in names:
        model, batch = load(name, device)
        x = batch(size)
        if kind == "training":
            functions.append(training(model, x, settings, "bfloat16" if reduced else "float32"))
            continue
        if reduced:
            model = model.to(torch.bfloat16)
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
        expected = inference(model, x, "eager")[1].float()
        function, output = inference(model, x, settings)
        functions.append(function)
        errors.append(((output.float() - expected).norm() / expected.norm()).item())
    prepared = time.perf_counter() - started
    if reduced:
        torch.cuda.reset_peak_memory_stats()
    steps, baseline = in_turn(functions, rounds, device)
    return {
        "kind": kind,
        "batch_size": size,
        "settings": settings,
        "steps_per_second": rounded_quartiles([size / value for value in steps], 2),
        "baseline_per_second": rounded_quartiles([size / value for value in baseline], 2),
        "speed_over_baseline": rounded_quartiles([theirs / ours for ours, theirs in zip(steps, baseline)]),
        "relative_error": [round(value, 6) for value in errors],
        "seconds_to_prepare": round(prepared, 1),
    }


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind and batch: each contender at the setting that is fastest for it, and their ratio."""
    found: dict[str, Any] = {}
    for row in rows:
        if "error" in row:
            continue
        key = f"{row['kind']} {row['batch_size']}"
        one = found.setdefault(key, {"steps": (0.0, ""), "baseline": (0.0, "")})
        for name in one:
            one[name] = max(one[name], (row[f"{name}_per_second"]["median"], row["settings"]))
    return {
        key: {
            "speed_over_baseline": round(one["steps"][0] / one["baseline"][0], 3),
            "steps": one["steps"],
            "baseline": one["baseline"],
        }
        for key, one in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="two small pairs and few rounds")
    parser.add_argument("--seconds", type=float, default=1e9, help="no measurement starts after so many")
    parser.add_argument("--pairs", nargs="+", choices=[*PAIRS], default=[*PAIRS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    pairs = QUICK if options.quick else {name: PAIRS[name] for name in options.pairs}
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    started = time.monotonic()
    result: dict[str, Any] = {"device": str(device), "rounds": rounds, "pairs": {}}
    for name, pair in pairs.items():
        rows: list[dict[str, Any]] = []
        settings = [setting for setting in pair.settings if device.type == "cuda" or "graph" not in setting]
        plan = [("inference", size, setting) for size in pair.batches for setting in settings]
        plan += [("training", pair.training, setting) for setting in settings if "graph" not in setting]
        for kind, size, setting in plan:
            if time.monotonic() - started > options.seconds:
                break
            try:
                rows.append(compare((pair.steps, pair.baseline), kind, size, setting, device, rounds))
            except Exception as error:  # what one setting cannot do must not cost the others
                rows.append({"kind": kind, "batch_size": size, "settings": setting, "error": str(error)[:300]})
            print(f"{name}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            result["pairs"][name] = {"models": [pair.steps, pair.baseline], "rows": rows, "best": best_of(rows)}
            if options.out:
                write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    ratios = [one["speed_over_baseline"] for found in result["pairs"].values() for one in found["best"].values()]
    result["median_of_best_ratios"] = round(statistics.median(ratios), 3) if ratios else None
    conclude("device_speed", result, options.out)


if __name__ == "__main__":
    main()
