r"""Residual and x_0 lambdas, as in nanochat (Karpathy, github.com/karpathy/nanochat, ``gpt.py``), after modded-nanogpt.

    x_{b+1} = Block_b(λ_b x_b + μ_b x_0)        x: (B, N, C), λ, μ: numbers, x_0: the start of the stream

Start: λ = 1 and μ = 0, which is the plain network; nanochat has since used other values for both. There, x_0 is the
normed embedding; here it is the stream as it starts, in a StepsNet that of each step. Nanochat trains μ at a hundred
times the rate of λ (0.5 and 0.005, beside matrices trained by Muon); here both have the rate of all other parameters.
Parameters: 2 per block, for the first block only λ. Traffic: x and x_0 are read and their sum is written once per
block, which adds 3, or 2 in the first block. Memory: x_0; in training also x of each block, for the gradient of λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .design import Branch, Connection, Place, Wiring, set_start

__all__ = ["Lambdas"]


class _WithStart(Wiring):
    """State: (x_0, x)."""

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def may_be(self, state: Tensor) -> bool:
        return False

    def finish(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return state[-1]


class Lambdas(Connection):
    title = "each block reads a learned mix of the stream and of its start"
    source = "nanochat, gpt.py"
    unit = "block"
    wiring = _WithStart
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        # the first block's stream is x_0 itself
        self.mix = nn.Parameter(torch.empty(2 if place.layer > 1 else 1))
        self.init_weights()

    def init_weights(self) -> None:
        set_start(self.mix, torch.eye(len(self.mix))[0])

    def forward(self, state: tuple[Tensor, Tensor], F: Branch) -> tuple[Tensor, Tensor]:
        x_0, x = state
        mixed = self.mix[0] * x
        return x_0, F(mixed + self.mix[1] * x_0 if len(self.mix) > 1 else mixed)

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        return 9.0 - 1.0 / layers
