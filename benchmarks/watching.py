"""What it costs to look at the residual stream in an update (``stream_interval``), over the same update unwatched.

Plain and watched updates of one model take turns, so that noise hits both alike.

    python benchmarks/watching.py [--updates N] [--batch-size B] [--out results/benchmarks/watching.json]

Ends in one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import timm
import torch
from outcome import conclude, rounded_quartiles
from torch import nn

import stepsnet  # noqa: F401 - registers the models
from stepsnet.analysis.residual_stream import stream_line

# that of cifar10/deep
MODEL = {"img_size": 32, "patch_size": 8, "num_classes": 10, "widths": (24, 34, 48), "depths": (53, 27, 16)}
WARM_UP = 2
INTERVALS = (25, 50, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = timm.create_model("steps_deit_tiny_patch16_224", **MODEL).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    images, labels = torch.randn(options.batch_size, 3, 32, 32), torch.randint(10, (options.batch_size,))

    def update(watched: bool) -> float:
        started = time.perf_counter()
        with stream_line(model, 1.0) if watched else nullcontext():
            nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    pairs = [(update(False), update(True)) for _ in range(options.updates)][WARM_UP:]
    extra = rounded_quartiles([(watched - plain) / plain for plain, watched in pairs])
    result = {
        "extra_of_a_watched_update": extra,
        "share_of_the_time": {str(interval): round(extra["median"] / interval, 5) for interval in INTERVALS},
        "plain_ms": rounded_quartiles([1000 * plain for plain, _ in pairs], 2),
        "batch_size": options.batch_size,
        "model": MODEL,
    }
    conclude("watching", result, options.out)


if __name__ == "__main__":
    main()
