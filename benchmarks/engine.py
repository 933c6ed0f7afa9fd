"""The engine's own cost: an update in the training loop over the same model's bare forward, backward and step.

Both are interleaved in one process, update by update, so that noise hits both alike: the task times a bare
update, then hands the loop the very same batch and times what it does with it until it asks for the next.

    python benchmarks/engine.py [--updates N] [--batch-size B] [--out results/benchmarks/engine.json]

Ends in one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import timm
import torch
from outcome import conclude, rounded_quartiles
from torch import nn

import stepsnet  # noqa: F401 - registers the models
from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.optim import build_optimizer
from stepsnet.engine.train import train
from stepsnet.settings.config import TrainingSettings

MODEL = {"img_size": 32, "patch_size": 8, "num_classes": 10, "widths": (24, 34, 48), "depths": (13, 7, 4)}
WARM_UP = 5


class Timed:
    """A task that times a bare update before each of the engine's."""

    monitor, lower_is_better, unit, units_per_sample = "score", False, "images", 1

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
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = TrainingSettings(epochs=1, batch_size=options.batch_size, warmup_epochs=0, device="cpu")
    models = [timm.create_model("steps_deit_tiny_patch16_224", **MODEL) for _ in range(2)]
    task = Timed(models[1].train(), settings, options.updates)
    with tempfile.TemporaryDirectory() as folder:
        context = DistributedContext(0, 1, torch.device("cpu"))
        train(models[0], task, settings, Path(folder), context, report=lambda event: json.dumps(event))
    bare, engine = task.bare[WARM_UP:], task.engine[WARM_UP:]
    result = {
        "ratio": rounded_quartiles([ours / theirs for ours, theirs in zip(engine, bare)]),
        "bare_ms": rounded_quartiles([1000 * seconds for seconds in bare], 2),
        "engine_ms": rounded_quartiles([1000 * seconds for seconds in engine], 2),
        "batch_size": options.batch_size,
        "model": MODEL,
    }
    conclude("engine", result, options.out)


if __name__ == "__main__":
    main()
