"""The engine's own cost: an update in the training loop over the same model's bare forward, backward and step.

Both are interleaved in one process, update by update, so that noise hits both alike: the task times a bare
update, then hands the loop the very same batch and times what it does with it until it asks for the next.

    python benchmarks/engine.py [--updates N] [--batch-size B]

Ends in one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from torch import nn

import stepsnet  # noqa: F401 - registers the models
from stepsnet.engine.distributed import Ranks
from stepsnet.engine.optim import build_optimizer
from stepsnet.engine.settings import TrainingSettings
from stepsnet.engine.train import fit
from stepsnet.provenance import provenance

MODEL = {"img_size": 32, "patch_size": 8, "num_classes": 10, "widths": (24, 34, 48), "depths": (13, 7, 4)}
WARM_UP = 5


class Timed:
    """A task that times a bare update before each of the engine's."""

    monitor = "score"

    def __init__(self, model: nn.Module, settings: TrainingSettings, updates: int):
        self.model, self.settings = model, settings
        self.steps_per_epoch, self.batch_size = updates, settings.batch_size
        self.optimizer = build_optimizer(model, settings)
        self.images, self.labels = torch.randn(self.batch_size, 3, 32, 32), torch.randint(10, (self.batch_size,))
        self.bare: list[float] = []
        self.engine: list[float] = []

    def bare_update(self) -> None:
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def batches(self, epoch, start, share, device):
        for _ in range(self.steps_per_epoch):
            started = time.perf_counter()
            self.bare_update()
            handed = time.perf_counter()
            yield self.images, self.labels
            self.bare.append(handed - started)
            self.engine.append(time.perf_counter() - handed)

    def loss(self, model, batch):
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), {}

    def evaluate(self, model, share, device):
        return {"score": 0.0}

    def notices(self):
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    settings = TrainingSettings(epochs=1, batch_size=options.batch_size, warmup_epochs=0, device="cpu")
    models = [timm.create_model("steps_deit_tiny_patch16_224", **MODEL) for _ in range(2)]
    task = Timed(models[1].train(), settings, options.updates)
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(0, 1, torch.device("cpu"))
        fit(models[0], task, settings, Path(folder), ranks, report=lambda event: json.dumps(event))
    ratios = [engine / bare for engine, bare in zip(task.engine[WARM_UP:], task.bare[WARM_UP:])]
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "benchmark": "engine",
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "bare_ms_median": round(1000 * statistics.median(task.bare[WARM_UP:]), 2),
        "engine_ms_median": round(1000 * statistics.median(task.engine[WARM_UP:]), 2),
        "updates": len(ratios),
        "batch_size": options.batch_size,
        "model": MODEL,
        **provenance(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
