"""UPerNet on Steps-Swin against the same decoder on Swin: images a second in training and inference, and memory.

    python benchmarks/segmentation.py [--recipe camvid/tiny] [--out results/benchmarks/segmentation.json]

Measures the recipe's model, its baseline and, if the baseline is a Steps-Swin of one step per stage, timm's own Swin of
the same sizes. Crops have the recipe's size and are noise. In each round every model has its turn, starting with
another one, so that noise hits all alike; ratios are within a round. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, rounded_quartiles

from stepsnet.analysis.complexity import count_complexity
from stepsnet.analysis.speed import Measured, measure_memory, measure_speed
from stepsnet.device import pick_device
from stepsnet.models import baseline_of
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.settings.config import ModelSpec, SegmentationRecipe


def on_timms_swin(spec: ModelSpec) -> ModelSpec | None:
    """The same UPerNet on timm's Swin; None if it stands on one already."""
    backbone, given = spec.args["backbone"], dict(spec.args["backbone_args"])
    if not backbone.startswith("steps_"):
        return None
    widths, depths, heads = (given.pop(name) for name in ("widths", "depths", "num_heads"))
    shape = {"embed_dim": widths[0][0], "depths": sum(depths, ()), "num_heads": sum(heads, ())}
    args = {**spec.args, "backbone": baseline_of(backbone), "backbone_args": {**given, **shape}}
    return ModelSpec(spec.name, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="camvid/tiny", help="one with a baseline, such as ade20k/steps_swin_tiny")
    parser.add_argument("--classes", type=int, default=11, help="those of the recipe's data, which are not opened")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--amp-dtype", default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recipe = find_recipe(options.recipe)
    assert isinstance(recipe, SegmentationRecipe) and recipe.baseline, "a segmentation recipe with a baseline"
    specs = {
        name: ModelSpec(spec.name, {"num_classes": options.classes, **spec.args})
        for name, spec in (("StepsNet", recipe.model), ("baseline", recipe.baseline))
    }
    if timms := on_timms_swin(specs["baseline"]):
        specs["timm's Swin"] = timms
    torch.manual_seed(0)
    shape, device = (3, recipe.crop_size, recipe.crop_size), pick_device(options.device)
    models = [Measured(name, build_model(spec), shape) for name, spec in specs.items()]
    counts = {one.name: count_complexity(one.model, shape) for one in models}
    seconds = measure_speed(models, options.batch_size, options.rounds, device, options.amp_dtype)
    rows: dict[str, Any] = {}
    for one in models:
        row: dict[str, Any] = {"params": counts[one.name].params, "macs": counts[one.name].macs}
        for kind in ("training", "inference"):
            taken, base = seconds[one.name][kind], seconds["baseline"][kind]
            row[f"{kind}_images_per_second"] = rounded_quartiles([options.batch_size / second for second in taken], 2)
            row[f"{kind}_speed_over_baseline"] = rounded_quartiles([b / second for b, second in zip(base, taken)])
        memory = measure_memory(one, (options.batch_size // 2, options.batch_size), device, options.amp_dtype)
        row["memory_mib_per_image"] = {kind: round(found["per_sample"] / 2**20, 2) for kind, found in memory.items()}
        rows[one.name] = row
    settings: dict[str, Any] = {"recipe": recipe.name, "batch_size": options.batch_size, "crop_size": recipe.crop_size}
    settings["device"] = str(device)
    conclude("segmentation", {**settings, "amp_dtype": options.amp_dtype, "models": rows}, options.out)


if __name__ == "__main__":
    main()
