"""Steps models against their baselines on one device, each at its best setting.

    python benchmarks/device_speed.py [--device cuda] [--quick] [--seconds 200] [--pairs NAME …] [--settings NAME …]
        [--out FILE.json]

The two models of a pair take turns under each setting, so that a change of clock speed hits both alike; ratios are
between neighbouring measurements. The settings are eager; for Swin, with permuted windows (inference only); compiled
(one block at a time, so that blocks of the same width share their graphs); and, on CUDA, each of these also as replayed
CUDA graphs. At batch 1 an eager model waits for its kernels to be launched: the graph's latency is the hardware's. All
pairs are measured eagerly before the first is compiled. In inference, weights on CUDA are bfloat16, and each setting's
outputs are compared with the eager model's. Training is under autocast, with AdamW, and its peak memory is recorded
beside what `activation_bytes` predicts. The file is written after every row. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, record, rounded_quartiles
from torch import Tensor, nn

from stepsnet.analysis.memory import activation_bytes
from stepsnet.analysis.speed import measured_peak
from stepsnet.bench import find_candidates
from stepsnet.device import autocast, pick_device
from stepsnet.files.writing import write_atomically
from stepsnet.models.build import build_model, input_size_of
from stepsnet.models.compilation import compile_blocks
from stepsnet.models.cuda_graph import GraphedTraining
from stepsnet.models.windows import permute_windows
from stepsnet.settings.config import ModelSpec

ROUNDS, QUICK_ROUNDS = 15, 3
TOKENS = 512


@dataclass(frozen=True)
class Pair:
    steps: str  # a model's name, or TABLE/ROW
    baseline: str
    batches: tuple[int, ...] = (1, 256)  # of inference
    training: int = 128
    settings: tuple[str, ...] = ("eager", "compiled")
    graphs: bool = True  # of inference on CUDA


WITH_WINDOWS = ("eager", "windows", "compiled")
PAIRS = {
    "deit_small": Pair("steps_deit_small_patch16_224", "deit_small_patch16_224"),
    "485_layers": Pair("table:5b/Steps-Swin 96 blocks", "table:5b/Swin 96 blocks", (1, 128), 64, WITH_WINDOWS),
    "resnet50": Pair("steps_resnet50", "resnet50"),
    # while a graph is captured, transformers builds a mask and attends by another kernel than otherwise
    "language_30M": Pair("table:4/Steps-Transformer 30M", "table:4/Transformer 30M", (1, 32), 16, graphs=False),
    "swin_tiny": Pair("steps_swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224", settings=WITH_WINDOWS),
    "482_layers": Pair("table:5a/Steps-DeiT 96 blocks", "table:5a/DeiT 96 blocks"),
    "swinpp_tiny": Pair("steps_swinpp_tiny_window7_224", "swinpp_tiny_window7_224", settings=WITH_WINDOWS),
    "deit_tiny": Pair("steps_deit_tiny_patch16_224", "deit_tiny_patch16_224"),
}
QUICK = {
    "test_vit": Pair("test_steps_deit", "test_vit", (1, 2), 2),
    "test_swin": Pair("test_steps_swin", "test_steps_swin", (1,), 2, ("eager", "windows")),
}


def spec_of(name: str) -> ModelSpec:
    table, slash, row = name.partition("/")
    if not slash:
        return ModelSpec(name)
    return next(found.spec for found in find_candidates([table]) if found.name == row)


def load(name: str, device: torch.device) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A model in eval mode on the device, and a function that makes a batch of a given size for it."""
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
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def logits_of(found: Any) -> Tensor:
    return getattr(found, "logits", found)


def inference(model: nn.Module, x: Tensor, setting: str) -> tuple[Callable[[], Any], Tensor]:
    """A forward pass under a setting, warmed up, and its output."""
    if setting != "eager":
        model = copy.deepcopy(model)
    if setting == "windows":
        permute_windows(model)
    if setting == "compiled":
        compile_blocks(model)
    kwargs = {"use_cache": False} if hasattr(model, "generate") else {}

    def run() -> Tensor:
        with torch.inference_mode():
            return logits_of(model(x, **kwargs))

    for _ in range(3):
        output = run()
    return run, output


def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """A forward pass as a replayed CUDA graph, and its output."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay(held: Any = (run, output)) -> None:  # keeps alive the weights and input that the graph reads
        graph.replay()

    replay()
    return replay, output


def training(model: nn.Module, x: Tensor, setting: str, amp_dtype: str) -> Callable[[], Any]:
    """A function that makes an update under a setting, warmed up."""
    model = copy.deepcopy(model).train()
    if setting.startswith("compiled"):
        compile_blocks(model)
    if setting.endswith("graph"):
        model.forward = GraphedTraining(model)
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


def compared(functions: list[Callable[[], Any]], size: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Samples per second of a Steps model and its baseline, and the ratio of neighbouring measurements."""
    steps, baseline = in_turn(functions, rounds, device)
    return {
        "steps_per_second": rounded_quartiles([size / value for value in steps], 2),
        "baseline_per_second": rounded_quartiles([size / value for value in baseline], 2),
        "speed_over_baseline": rounded_quartiles([theirs / ours for ours, theirs in zip(steps, baseline)]),
    }


Loaded = list[tuple[nn.Module, Callable[[int], Tensor]]]  # a pair's two models


def of_inference(
    loaded: Loaded, size: int, setting: str, graph: bool, device: torch.device, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of a batch size under a setting and, with ``graph``, that of its CUDA graph."""
    reduced, started = device.type == "cuda", time.perf_counter()
    runs, outputs, expected = [], [], []
    for model, batch in loaded:
        x = batch(size)
        if reduced:
            model = copy.deepcopy(model).to(torch.bfloat16)
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
        expected.append(inference(model, x, "eager")[1].float())
        run, output = inference(model, x, setting)
        runs.append(run)
        outputs.append(output)
    for name in (setting, f"{setting} graph") if graph else (setting,):
        if name != setting:
            started = time.perf_counter()
            runs, outputs = map(list, zip(*[captured(run) for run in runs], strict=True))
        prepared = time.perf_counter() - started
        errors = [((got.float() - right).norm() / right.norm()).item() for got, right in zip(outputs, expected)]
        yield {
            "kind": "inference",
            "batch_size": size,
            "setting": name,
            **compared(runs, size, device, rounds),
            "relative_error": [round(value, 6) for value in errors],
            "seconds_to_prepare": round(prepared, 1),
        }


def of_training(loaded: Loaded, size: int, setting: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the row of a batch size under a setting and, on CUDA, that with its passes in CUDA graphs."""
    amp_dtype = "bfloat16" if device.type == "cuda" else "float32"
    for name in (setting, f"{setting} graph") if device.type == "cuda" else (setting,):
        started = time.perf_counter()
        runs = [training(model, batch(size), name, amp_dtype) for model, batch in loaded]
        prepared = time.perf_counter() - started
        row = {"kind": "training", "batch_size": size, "setting": name}
        row |= compared(runs, size, device, rounds) | {"seconds_to_prepare": round(prepared, 1)}
        if device.type == "cuda" and name == setting:
            row["peak_bytes"] = [measured_peak(run, device) for run in runs]
        if name == "eager":
            samples = [batch(1)[0] for _, batch in loaded]
            row["predicted_bytes"] = [
                None if sample.ndim == 1 else activation_bytes(model, sample.shape, size, amp_dtype=amp_dtype)
                for (model, _), sample in zip(loaded, samples)
            ]
        yield row


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind and batch: each contender at the setting that is fastest for it, and the ratio of their medians.

    Settings are measured one after another, so there are no neighbouring measurements whose ratio could be taken.
    """
    found: dict[str, Any] = {}
    for row in rows:
        if "error" in row:
            continue
        key = f"{row['kind']} {row['batch_size']}"
        one = found.setdefault(key, {"steps": (0.0, ""), "baseline": (0.0, "")})
        for name in one:
            one[name] = max(one[name], (row[f"{name}_per_second"]["median"], row["setting"]))
    return {
        key: {
            "speed_over_baseline": round(one["steps"][0] / one["baseline"][0], 3),
            "steps": one["steps"],
            "baseline": one["baseline"],
        }
        for key, one in found.items()
    }


def plan_of(pairs: dict[str, Pair], settings: Sequence[str]) -> Iterator[tuple[str, Pair, str, str, int]]:
    """(pair's name, pair, setting, kind, batch) of each measurement; eager ones come before any compiled one."""
    for setting in settings:
        for name, pair in pairs.items():
            if setting not in pair.settings:
                continue
            for size in pair.batches:
                yield name, pair, setting, "inference", size
            if setting != "windows":
                yield name, pair, setting, "training", pair.training


def still_works(device: torch.device) -> bool:
    """Whether the device still computes, as it does, for example, after a graph could not be captured."""
    try:
        return bool((torch.ones(2, device=device) + 1).sum() == 4)
    except RuntimeError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="two small pairs and few rounds")
    parser.add_argument("--seconds", type=float, default=1e9, help="no measurement starts after so many")
    parser.add_argument("--pairs", nargs="+", choices=[*PAIRS], default=[*PAIRS])
    parser.add_argument("--settings", nargs="+", choices=WITH_WINDOWS, default=WITH_WINDOWS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    pairs = QUICK if options.quick else {name: PAIRS[name] for name in options.pairs}
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    started = time.monotonic()
    found: dict[str, dict[str, Any]] = {
        name: {"models": [pair.steps, pair.baseline], "rows": [], "best": {}} for name, pair in pairs.items()
    }
    result: dict[str, Any] = {"device": str(device), "rounds": rounds, "pairs": found}

    origin = record("device_speed", {"device": str(device)})  # asks git once, and not between measurements

    def keep(name: str, row: dict[str, Any]) -> None:
        print(f"{name}: {json.dumps(row)}", file=sys.stderr, flush=True)
        found[name]["rows"].append(row)
        found[name]["best"] = best_of(found[name]["rows"])
        if options.out:
            write_atomically(options.out, json.dumps(origin | result, indent=1) + "\n")

    last: tuple[str, str] | None = None
    loaded: Loaded = []
    for name, pair, setting, kind, size in plan_of(pairs, options.settings):
        if time.monotonic() - started > options.seconds:
            break
        try:
            if last != (name, setting):
                last, loaded = None, []  # frees the previous pair
                loaded = [load(model, device) for model in (pair.steps, pair.baseline)]
                last = (name, setting)
            if kind == "training":
                rows = of_training(loaded, size, setting, device, rounds)
            else:
                rows = of_inference(loaded, size, setting, pair.graphs and device.type == "cuda", device, rounds)
            for row in rows:
                keep(name, row)
        except Exception as error:  # what one setting cannot do must not cost the others
            keep(name, {"kind": kind, "batch_size": size, "setting": setting, "error": str(error)[:300]})
            if not still_works(device):  # after some CUDA errors nothing more runs in this process
                break
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ratios = [one["speed_over_baseline"] for each in found.values() for one in each["best"].values()]
    result["median_of_best_ratios"] = round(statistics.median(ratios), 3) if ratios else None
    conclude("device_speed", result, options.out)


if __name__ == "__main__":
    main()
