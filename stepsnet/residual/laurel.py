r"""LAuReL-LR: Menghani et al., "LAuReL: Learned Augmented Residual Layer", arXiv 2411.07501, Sec. 2.2.

    x_{l+1} = F_l(x_l) + A_l B_l x_l + x_l        x: (B, N, C), A: (C, r), B: (r, C)

Start: A = 0, which is the plain network, and B_ji = 1/√(rC) if i mod r = j, else 0, so that its rows are orthogonal
(Sec. 3.3, where the letters are the other way round: W = A B + I for rows x, and B A x). Parameters, and MACs per
token: 2 r C per branch. Traffic: as in the plain stream, with the map fused with the sum. Memory: Bx, (B, N, r). The
paper's residual weights (RW) and previous activations (PA) are not part of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .design import Branch, Connection, Place, check_bounds, set_start

__all__ = ["LAuReL"]


class LAuReL(Connection):
    title = "a learned low-rank map beside the identity"
    source = "arXiv 2411.07501, Sec. 2.2"
    options = {"rank": 16}  # noqa: RUF012
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.A = nn.Parameter(torch.empty(place.width, options["rank"]))
        self.B = nn.Parameter(torch.empty(options["rank"], place.width))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.zeros_(self.A)
        rank, width = self.B.shape
        set_start(self.B, torch.eye(rank).repeat(1, -(-width // rank))[:, :width] * (rank * width) ** -0.5)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x) + x @ self.B.T @ self.A.T

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("laurel", options, rank=(1, width))
