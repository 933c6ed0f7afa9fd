"""What a loop over the blocks of a StepsNet costs, in which each block copies the whole stream, against the container.

    python benchmarks/stream_blocks.py [--model NAME] [--batch-size 8] [--out results/benchmarks/stream_blocks.json]

EVA, BEiT and the models of transformers loop over their blocks; ViT, Swin and ConvNeXt call a container. The blocks of
one model run both ways in turn, forward and backward; the memory of activations is predicted. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from outcome import conclude, rounded_quartiles
from torch import Tensor, nn

import stepsnet
from stepsnet.analysis.memory import activation_bytes

ROUNDS = 15


class Loop(nn.Module):
    """The blocks of a container, one after another, as functions of the whole stream."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seconds(network: nn.Module, x: Tensor) -> float:
    started = time.perf_counter()
    network(x).sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    blocks = stepsnet.stepify(options.model).blocks
    x = torch.randn(options.batch_size, 197, blocks.width)
    ways = {"container": blocks, "loop": Loop(blocks)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name in sorted(ways, reverse=bool(round_ % 2)):
            taken = seconds(ways[name], x)
            if round_:  # the first warms up
                times[name].append(taken)
    memory = {name: activation_bytes(way, x.shape[1:], len(x)) for name, way in ways.items()}
    result = {
        "model": options.model,
        "plan": {"widths": blocks.widths, "depths": blocks.depths},
        "batch_size": options.batch_size,
        "loop_over_container": rounded_quartiles([a / b for a, b in zip(times["loop"], times["container"])]),
        "activation_bytes": memory,
    }
    conclude("stream_blocks", result, options.out)


if __name__ == "__main__":
    main()
