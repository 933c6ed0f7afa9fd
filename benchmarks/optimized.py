"""What `stepsnet.optimize` gives, and what the doubled depth costs with it: Steps models and timm's on a CPU.

    python benchmarks/optimized.py [--pairs NAME …] [--kinds inference training] [--amp-dtype bfloat16] [--out FILE]

The two models of a pair take turns: as built, optimized without compilation (inference only) and optimized with it.
Ratios are between neighbouring measurements, outputs are compared with those of the model as built, and the rate of the
machine's matrix products is measured in the same rounds. With one thread, times are processor time, which other
programs on the machine disturb less than wall-clock time. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, rounded_quartiles
from timm.layers import DropPath
from torch import Tensor, nn

from stepsnet import optimize
from stepsnet.analysis.complexity import count_complexity
from stepsnet.bench import find_candidates
from stepsnet.device import autocast
from stepsnet.models.build import build_model, input_size_of
from stepsnet.settings.config import ModelSpec

PAIRS = {
    "deit_tiny": ("steps_deit_tiny_patch16_224", "deit_tiny_patch16_224"),
    "deit_small": ("steps_deit_small_patch16_224", "deit_small_patch16_224"),
    "swin_tiny": ("steps_swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224"),
    "resnet50": ("steps_resnet50", "resnet50"),
    "485_layers": ("table:5b/Steps-Swin 96 blocks", "table:5b/Swin 96 blocks"),
    "widths_tiny": ("steps_deit_tiny, multiples of 32", "steps_deit_tiny_patch16_224"),
    "widths_small": ("steps_deit_small, multiples of 64", "steps_deit_small_patch16_224"),
    "test": ("test_steps_deit", "test_vit"),
}
# in place of the paper's 136 and 272, which are nearest to √2; with one more block of that width for the same MACs
WIDTHS: dict[str, dict[str, Any]] = {
    "steps_deit_tiny, multiples of 32": {"widths": (96, 128, 192), "depths": (12, 7, 6), "num_heads": (2, 2, 3)},
    "steps_deit_small, multiples of 64": {"widths": (192, 256, 384), "depths": (12, 7, 6), "num_heads": (3, 4, 6)},
}
SETTINGS = {
    "inference": ("as built", "optimized, not compiled", "optimized"),
    "training": ("as built", "optimized"),
}
SIDE = 1024  # of the square matrices whose product gives the machine's rate
CPU = torch.device("cpu")


def spec_of(name: str) -> ModelSpec:
    if name in WIDTHS:
        return ModelSpec(f"{name.partition(',')[0]}_patch16_224", args=WIDTHS[name])
    table, slash, row = name.partition("/")
    return next(c.spec for c in find_candidates([table]) if c.name == row) if slash else ModelSpec(name)


@torch.no_grad()
def make_comparable(model: nn.Module) -> None:
    """Draw norms as if trained: a new ResNet ends each branch with a norm of zeros, which would hide earlier errors."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.1)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, DropPath):
            module.drop_prob = 0.0  # what it draws would differ between the settings


def inference(model: nn.Module, x: Tensor, amp_dtype: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.inference_mode(), autocast(amp_dtype, CPU):
            return model(x)

    return run


def training(model: nn.Module, x: Tensor, amp_dtype: str) -> Callable[[], Tensor]:
    """A function that makes an update and returns the logits."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    labels = torch.zeros(len(x), dtype=torch.long)

    def run() -> Tensor:
        with autocast(amp_dtype, CPU):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return logits.detach()

    return run


def contenders(name: str, kind: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Callable]]:
    """What one model is and, for each setting, its function, which has run twice."""
    spec = spec_of(name)
    torch.manual_seed(0)
    model = build_model(spec).eval()
    make_comparable(model)
    shape = input_size_of(spec, model)
    found: dict[str, Any] = {"model": name, "macs": count_complexity(model, shape).macs, "settings": {}}
    x = torch.randn(options.batch_size, *shape)
    functions: dict[str, Callable] = {}
    expected = None
    for setting in SETTINGS[kind][: -1 if options.no_compile else None]:
        own = copy.deepcopy(model)
        if setting != "as built":
            own = optimize(own, kind, compile=setting == "optimized")
        function = (inference if kind == "inference" else training)(own, x, options.amp_dtype)
        started = time.perf_counter()
        output = function().float()
        prepared = time.perf_counter() - started
        function()
        expected = output if expected is None else expected
        error = ((output - expected).norm() / expected.norm()).item()
        found["settings"][setting] = {"relative_error": round(error, 7), "seconds_to_prepare": round(prepared, 1)}
        functions[setting] = function
    return found, functions


def compare(names: tuple[str, str], kind: str, options: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    made = [contenders(name, kind, options) for name in names]
    square = torch.randn(SIDE, SIDE)
    turns: dict[Any, Callable] = {"product": lambda: square @ square}
    for number, (_, functions) in enumerate(made):
        turns |= {(number, setting): function for setting, function in functions.items()}
    seconds: dict[Any, list[float]] = {key: [] for key in turns}
    for turn in range(options.rounds):
        for key in list(turns) if turn % 2 else reversed(list(turns)):
            started = clock()
            turns[key]()
            seconds[key].append(clock() - started)
    rate = [2 * SIDE**3 / taken for taken in seconds["product"]]
    for number, (found, functions) in enumerate(made):
        for setting in functions:
            row, taken = found["settings"][setting], seconds[number, setting]
            row["per_second"] = rounded_quartiles([options.batch_size / one for one in taken], 2)
            built = seconds[number, "as built"]
            row["speed_over_as_built"] = rounded_quartiles([a / b for a, b in zip(built, taken)], 3)
            if kind == "inference":
                flops = 2 * found["macs"] * options.batch_size
                row["share_of_the_matrix_rate"] = rounded_quartiles([flops / a / b for a, b in zip(taken, rate)], 3)
    middle = options.rounds // 2
    best = [min(made[n][1], key=lambda setting: sorted(seconds[n, setting])[middle]) for n in (0, 1)]
    ratio = [theirs / ours for ours, theirs in zip(seconds[0, best[0]], seconds[1, best[1]])]
    as_built = [theirs / ours for ours, theirs in zip(seconds[0, "as built"], seconds[1, "as built"])]
    return {
        "kind": kind,
        "models": [found for found, _ in made],
        "best": best,
        "speed_over_baseline": {
            "as built": rounded_quartiles(as_built, 3),
            "each at its best": rounded_quartiles(ratio, 3),
        },
        "gflops_of_a_product": rounded_quartiles([value / 1e9 for value in rate], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pairs", nargs="+", choices=[*PAIRS], default=["deit_tiny", "deit_small", "swin_tiny", "resnet50"]
    )
    parser.add_argument("--kinds", nargs="+", choices=[*SETTINGS], default=["inference"])
    parser.add_argument("--amp-dtype", default="float32")
    parser.add_argument("--no-compile", action="store_true", help="without the last setting, which takes minutes")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("amp_dtype", "batch_size", "rounds", "threads")}
    rows = [{"pair": pair, **compare(PAIRS[pair], kind, options)} for pair in options.pairs for kind in options.kinds]
    conclude("optimized", {**settings, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
