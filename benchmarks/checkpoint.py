"""Time to write and to load a checkpoint, against torch.save and torch.load of the same tensors.

    python benchmarks/checkpoint.py [--model NAME] [--out results/benchmarks/checkpoint.json]

Ours is flushed to the disk and checksummed on writing, and verified on loading; torch's is neither.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from outcome import conclude, rounded_quartiles

import stepsnet  # noqa: F401 - registers the models
from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.optim import build_optimizer
from stepsnet.engine.train_state import TrainState
from stepsnet.run_folder.checkpoint import latest
from stepsnet.settings.config import TrainingSettings

ROUNDS = 7


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="steps_deit_small_patch16_224")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = timm.create_model(options.model)
    optimizer = build_optimizer(model, TrainingSettings())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that the optimizer has its moments
    trained = TrainState(model, optimizer, None, DistributedContext(0, 1, torch.device("cpu")), sharded=False)
    times: dict[str, list[float]] = {name: [] for name in ("write", "load", "torch_save", "torch_load")}

    def load() -> None:
        found, _ = latest(checkpoints)
        assert found
        trained.restore(found)

    def torch_load() -> None:
        state = torch.load(plain, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    with tempfile.TemporaryDirectory() as folder:
        checkpoints, plain = Path(folder) / "checkpoints", Path(folder) / "plain.pt"
        for turn in range(ROUNDS):
            times["write"].append(seconds(lambda: trained.save(checkpoints, turn, {}, keep=1)))  # noqa: B023
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            times["torch_save"].append(seconds(lambda: torch.save(state, plain)))  # noqa: B023
            times["load"].append(seconds(load))
            times["torch_load"].append(seconds(torch_load))
        size = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
    found = {f"{name}_seconds": rounded_quartiles(values, 3) for name, values in times.items()}
    conclude("checkpoint", {"model": options.model, "mib": round(size / 2**20, 1), **found}, options.out)


if __name__ == "__main__":
    main()
