"""Ways to begin a grown network with the function of the old one, and whether they learn alike.

    python benchmarks/grow_starts.py [--out results/benchmarks/grow_starts.json]

A ViT of 24 channels is trained on scikit-learn's digits with noise, grown in each way to 34 channels, and trained on
with the same batches. The loss is measured on images that were not trained on; differences from ``stepsnet.grow`` are
paired over four seeds. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from outcome import conclude
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stepsnet
from stepsnet.report.t_interval import tested

SEEDS = (1, 2, 3, 4)
BEFORE, AFTER = 300, 200  # updates
RATE, NOISE, OLD = 2e-3, 0.3, 24


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """(images, labels, a fixed order)"""
    found = load_digits()
    images = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(found.target), torch.randperm(len(images), generator=torch.Generator().manual_seed(0))


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=generator)


def train(model: nn.Module, data: tuple[Tensor, Tensor, Tensor], seed: int, updates: int) -> float:
    """Train for ``updates`` updates; returns the loss on the images that are not trained on."""
    images, labels, order = data
    generator, train_split, other = torch.Generator().manual_seed(seed), order[:1200], order[1200:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    model.train()
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (update + 1) / 20) * (1 + math.cos(math.pi * update / updates)) / 2
        batch = train_split[torch.randint(len(train_split), (64,), generator=generator)]
        loss = nn.functional.cross_entropy(model(noisy(images[batch], generator)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(noisy(images[other], torch.Generator().manual_seed(99)))
        return nn.functional.cross_entropy(logits, labels[other]).item()


@torch.no_grad()
def scaled_embeddings(model: Any, factor: float) -> None:
    for tensor in (model.patch_embed.proj.weight, model.patch_embed.proj.bias):
        tensor[OLD:] *= factor
    model.pos_embed[..., OLD:] *= factor


@torch.no_grad()
def norm_of_zeros(model: Any) -> None:
    """As with a tied head: its new columns are drawn at random, and the last norm's new weights are zeros."""
    model.head.weight[:, OLD:].normal_(std=0.02)
    model.fc_norm.parts[1].weight.zero_()


@torch.no_grad()
def embeddings_of_zeros(model: Any) -> None:
    scaled_embeddings(model, 0.0)
    model.head.weight[:, OLD:].normal_(std=0.02)


WAYS: dict[str, Callable[[Any], None]] = {
    "stepsnet.grow": lambda model: None,
    "embeddings 3 times as large": lambda model: scaled_embeddings(model, 3.0),
    "embeddings 0.3 times as large": lambda model: scaled_embeddings(model, 0.3),
    "embeddings of zeros, a drawn head": embeddings_of_zeros,
    "a norm of zeros, a drawn head": norm_of_zeros,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = digits()
    losses: dict[str, list[float]] = {"before growing": [], **{way: [] for way in WAYS}}
    architecture = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10, class_token=False, global_pool="avg")
    for seed in SEEDS:
        torch.manual_seed(seed)
        steps = dict(widths=(OLD,), depths=(4,), num_heads=(2,))
        small = timm.create_model("steps_deit_tiny_patch16_224", **architecture, **steps)
        losses["before growing"].append(train(small, data, seed, BEFORE))
        for way, change in WAYS.items():
            torch.manual_seed(seed)
            model = stepsnet.grow(small)
            change(model)
            losses[way].append(train(model, data, seed, AFTER))
    rows: dict[str, Any] = {}
    for way, values in losses.items():
        differences = [value - ours for value, ours in zip(values, losses["stepsnet.grow"])]
        mean, low, high, _ = tested(differences, 0.95)
        rows[way] = {"loss": values, "difference": {"mean": mean, "interval": [low, high]}}
    conclude("grow_starts", {"updates": [BEFORE, AFTER], "rate": RATE, "ways": rows}, options.out)


if __name__ == "__main__":
    main()
