"""Detectors side by side: images a second in training and inference, and the most memory, round by round in turn.

    python benchmarks/detection.py [--detector cascade_mask_rcnn] [--size 800] [--batch-size 2] [--rounds 10]
    python benchmarks/detection.py --size 160 --batch-size 1 --rounds 3 --samples 64 --detections 20    # for a CPU

torchvision's own Mask R-CNN on its ResNet-50, and our heads on timm's ResNet-50, timm's Swin-T and Steps-Swin-T.
Images are noise of size × 1.6 size with eight objects each. Weights are random, so it would be chance how many boxes
overlap or score high: every detector keeps the RPN's first 1,000 boxes and returns the 100 that score highest, whatever
their scores. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, rounded_quartiles
from torch import nn
from torchvision.models.detection import maskrcnn_resnet50_fpn

from stepsnet.analysis.speed import measured_peak
from stepsnet.device import autocast as autocast_in
from stepsnet.device import pick_device
from stepsnet.models.build import build_model
from stepsnet.settings.config import ModelSpec

BACKBONES = {
    "ResNet-50": "resnet50",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "Steps-Swin-T": "steps_swin_tiny_patch4_window7_224",
}
BASE = "Swin-T"  # the others' speeds are given as ratios to it within a round
CLASSES, OBJECTS = 80, 8


def build(detector: str, size: int, samples: int, detections: int) -> dict[str, nn.Module]:
    limits = {"min_size": size, "max_size": 2 * size, "num_classes": 1 + CLASSES, "box_batch_size_per_image": samples}
    models = {"torchvision's ResNet-50": maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, **limits)}
    for name, backbone in BACKBONES.items():
        args = {"backbone": backbone, "num_classes": CLASSES, "size": size, "max_size": 2 * size}
        args["samples"] = samples
        models[name] = build_model(ModelSpec(detector, args))
    for model in models.values():
        model.rpn.nms_thresh = 1.0
        for stage in getattr(model.roi_heads, "stages", [model.roi_heads]):
            stage.score_thresh, stage.detections_per_img = 0.0, detections
    return models


def make_batch(count: int, size: int, device: torch.device) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    generator, height, width = torch.Generator().manual_seed(0), size, round(1.6 * size)
    images, targets = [], []
    for _ in range(count):
        corner = torch.rand(OBJECTS, 2, generator=generator) * torch.tensor([0.5 * width, 0.5 * height])
        sides = (0.1 + 0.3 * torch.rand(OBJECTS, 2, generator=generator)) * torch.tensor([width, height])
        boxes = torch.cat([corner, corner + sides], 1)
        masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist()):
            mask[y1:y2, x1:x2] = 1
        labels = torch.randint(1, CLASSES + 1, (OBJECTS,), generator=generator)
        images.append(torch.rand(3, height, width, generator=generator).to(device))
        targets.append({k: v.to(device) for k, v in (("boxes", boxes), ("labels", labels), ("masks", masks))})
    return images, targets


def training(model: nn.Module, batch: Any, autocast: Callable) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    images, targets = batch

    def update() -> None:
        model.train()
        with autocast():
            loss = sum(model(images, targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def inference(model: nn.Module, batch: Any, autocast: Callable) -> Callable[[], None]:
    def detect() -> None:
        model.eval()
        with torch.inference_mode(), autocast():
            model(batch[0])

    return detect


def measure(models: dict[str, nn.Module], batch: Any, rounds: int, device: torch.device, amp_dtype: str) -> list[dict]:
    lower = partial(autocast_in, amp_dtype, device)
    kinds = {"inference": inference, "training": training}
    work = {(name, kind): make(model, batch, lower) for name, model in models.items() for kind, make in kinds.items()}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    bytes_of: dict[tuple[str, str], int] = {}
    for turn in range(rounds + 1):
        for key, function in work.items():
            if turn == 0:  # which warms up as well
                function()
                bytes_of[key] = measured_peak(function, device)
                continue
            started = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rates[key].append(len(batch[0]) / (time.perf_counter() - started))
    return [
        {"model": name, "parameters": sum(p.numel() for p in model.parameters())}
        | {f"{kind}_images_per_second": rounded_quartiles(rates[name, kind]) for kind in kinds}
        | {
            f"{kind}_speed_over_swin": rounded_quartiles([a / b for a, b in zip(rates[name, kind], rates[BASE, kind])])
            for kind in kinds
        }
        | {f"{kind}_peak_mib": round(bytes_of[name, kind] / 2**20, 1) for kind in kinds}
        for name, model in models.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--detector", choices=("mask_rcnn", "cascade_mask_rcnn"), default="mask_rcnn")
    parser.add_argument("--size", type=int, default=800, help="shorter side in pixels (default: 800)")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="at least 2 (default: 10)")
    parser.add_argument("--samples", type=int, default=512, help="boxes an image that are trained on (default: 512)")
    parser.add_argument("--detections", type=int, default=100, help="boxes an image that are kept (default: 100)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--amp-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    torch.manual_seed(0)
    built = build(options.detector, options.size, options.samples, options.detections)
    models = {name: model.to(device) for name, model in built.items()}
    batch = make_batch(options.batch_size, options.size, device)
    rows = measure(models, batch, options.rounds, device, options.amp_dtype)
    settings = {
        key: getattr(options, key) for key in ("detector", "size", "batch_size", "samples", "detections", "amp_dtype")
    }
    conclude("detection", {**settings, "device": str(device), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
