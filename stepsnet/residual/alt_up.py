r"""AltUp, recycled: Baykal et al., "Alternating Updates for Efficient Transformers", 2301.13310, Alg. 1, Sec. 3.3.

    x̂_i = Σ_j p_{i,j} x_j                    predict        x: n streams, (B, N, n, C), p: (n, n)
    x̃ = Block(x_a), a = block mod n           compute one of them
    x_i ← x̂_i + g_i (x̃ - x̂_a)                correct        g: (n)

The start of the stream is copied to all n, and its end is their mean; the paper adds them up, which makes no difference
to the norm that follows. Start (ours): p = I and g = 1, which is the plain network. Parameters: n² + n per block. MACs
per token and block: n² C. Traffic per block: 6 inside it, x and x̃ read (n + 1), and n written; n + 1 for the mean at
the end. Memory: n streams, and in training a copy of the active one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .design import Branch, Connection, Place, check_bounds, precise, set_start, without_autocast
from .streams import Streams

__all__ = ["AltUp"]


class AltUp(Connection):
    title = "several streams; each block works on one and corrects the others"
    source = "arXiv 2301.13310, Alg. 1"
    unit = "block"
    wiring = Streams
    options = {"streams": 2}  # noqa: RUF012
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.streams, self.active = options["streams"], (place.layer - 1) % options["streams"]
        self.p = nn.Parameter(torch.empty(self.streams**2))
        self.g = nn.Parameter(torch.empty(self.streams))
        self.init_weights()

    def init_weights(self) -> None:
        set_start(self.p, torch.eye(self.streams).flatten())
        nn.init.ones_(self.g)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        with without_autocast(x):
            predicted = (precise(self.p).view(self.streams, self.streams) @ precise(x)).to(x.dtype)  # (B, N, n, C)
        # a copy, since the block may add in place, and the gradient of p needs x
        innovation = F(x[..., self.active, :].clone()) - predicted[..., self.active, :]  # (B, N, C)
        return predicted + self.g[:, None] * innovation.unsqueeze(-2)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("alt_up", options, streams=(2, 64))

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        n = options["streams"]
        return 6.0 + 2 * n + 1 + (n + 1) / layers
