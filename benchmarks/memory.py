"""Hold the predicted memory of training against the peak that torch's profiler sees on the CPU.

    python benchmarks/memory.py results/memory/cpu.json    # writes the file; the last line printed is its JSON

Each case builds the model and AdamW and makes two updates, of one micro-batch or of two accumulated ones.
The formula is for the accumulated ones; with one it is an upper bound, since gradients arrive
while activations are freed. The images themselves are left out on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from outcome import conclude

import stepsnet  # noqa: F401 - registers the models with timm
from stepsnet.analysis.memory import activation_bytes, states_memory
from stepsnet.analysis.speed import measured_peak
from stepsnet.device import AMP_DTYPES

TINY, SMALL, DEIT = "steps_deit_tiny_patch16_224", "steps_deit_small_patch16_224", "deit_tiny_patch16_224"
CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    dict(model=TINY, micro_batch=2),
    dict(model=TINY, micro_batch=4),
    dict(model=TINY, micro_batch=4, amp_dtype="bfloat16"),
    dict(model=TINY, micro_batch=4, grad_checkpointing=1.0),
    dict(model=DEIT, micro_batch=2),
    dict(model=DEIT, micro_batch=4),
    dict(model=SMALL, micro_batch=2),
]


def train(name: str, images: torch.Tensor, accumulated: int, grad_checkpointing: float, amp_dtype: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name).train()
    model.set_grad_checkpointing(bool(grad_checkpointing))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.zeros(len(images), dtype=torch.long)
    lower = amp_dtype != "float32"
    for _ in range(2):
        for _ in range(accumulated):
            with torch.autocast("cpu", AMP_DTYPES[amp_dtype]) if lower else contextlib.nullcontext():
                loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measure(
    model: str,
    micro_batch: int,
    grad_checkpointing: float = 0.0,
    amp_dtype: str = "float32",
    input_size: tuple[int, int, int] = (3, 224, 224),
) -> dict[str, Any]:
    """Predicted and measured bytes of one case."""
    with torch.device("meta"):
        described = timm.create_model(model)
    options: dict[str, Any] = dict(grad_checkpointing=grad_checkpointing, amp_dtype=amp_dtype)
    activations = activation_bytes(described, input_size, micro_batch, **options)
    predicted = states_memory(described, optimizer_states=2, activations=activations).as_dict()
    images = torch.zeros(micro_batch, *input_size)
    one, two = (measured_peak(partial(train, model, images, n, grad_checkpointing, amp_dtype), CPU) for n in (1, 2))
    measured = {"accumulated": two, "one_micro_batch": one}
    return {"model": model, "micro_batch": micro_batch, **options, "predicted": predicted, "measured": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="a file for the result")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(measure(**case))
        print(rows[-1], file=sys.stderr, flush=True)
    conclude("memory", {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
