r"""Hyper-Connections: Zhu et al., arXiv 2409.19606, Eqs. 1 to 5 (static) and 10 to 13 (dynamic), Alg. 1 and 2.

    h = A_m^T H,   H ← A_r^T H + B^T F(h)        H: n streams, (B, N, n, C), A_m, B: (n), A_r: (n, n)
    A_m = s_α tanh(norm(H) W_m) + A_m^0,   A_r = s_α tanh(norm(H) W_r) + A_r^0,   B = s_β tanh(norm(H) W_β) + B^0

with W_m: (C), W_r: (C, n), W_β: (C), and norm a LayerNorm without a weight, which would only multiply W. The streams
start as copies and end in their mean. The paper adds them up, which makes no difference to the norm that follows; for
the sum, it scales the start of the branches' last layers by √n, which the mean does not need. A, B and s have no weight
decay, like the paper's static part. Start: W = 0, s = 0.01, A_r^0 = I, B^0 = 1, and A_m^0 of layer l picks stream l mod
n, which is the plain network. ``dynamic=False`` leaves out W and s. Parameters per branch: n² + 2n + 2 + (n + 2) C.
MACs per token and branch: (n + 2) n C + (n + 1) n C + n C. Traffic per branch: n read and 1 written for h, n + 1 read
and n written for H; n + 1 for the mean at the end. Memory: n streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .design import Branch, Connection, Place, check_bounds, precise, set_start, without_autocast
from .streams import Streams

__all__ = ["HyperConnections"]


class HyperConnections(Connection):
    title = "several streams with learned ways in, out and across"
    source = "arXiv 2409.19606, Eqs. 1-5, 10-13"
    wiring = Streams
    options = {"streams": 4, "dynamic": True}  # noqa: RUF012
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.n = n = options["streams"]
        self.A_m, self.A_r, self.B = (nn.Parameter(torch.empty(size)) for size in (n, n * n, n))
        self.dynamic = options["dynamic"]
        if self.dynamic:
            self.W = nn.Parameter(torch.empty(place.width, n + 2))  # W_m, W_r and W_β side by side
            self.s = nn.Parameter(torch.empty(2))  # s_α, s_β
        self.init_weights()

    def init_weights(self) -> None:
        set_start(self.A_m, torch.eye(self.n)[(self.place.layer - 1) % self.n])
        set_start(self.A_r, torch.eye(self.n).flatten())
        nn.init.ones_(self.B)
        if self.dynamic:
            nn.init.zeros_(self.W)
            nn.init.constant_(self.s, 0.01)

    def coefficients(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H: (B, N, n, C) -> A_m (…, n), A_r (…, n, n), B (…, n)."""
        A_m, A_r, B = precise(self.A_m), precise(self.A_r).view(self.n, self.n), precise(self.B)
        if not self.dynamic:
            return A_m, A_r, B
        m, r, beta = torch.tanh(functional.layer_norm(H, H.shape[-1:]) @ precise(self.W)).split([1, self.n, 1], -1)
        s_alpha, s_beta = precise(self.s)
        return s_alpha * m.squeeze(-1) + A_m, s_alpha * r + A_r, s_beta * beta.squeeze(-1) + B

    def forward(self, H: Tensor, F: Branch) -> Tensor:
        with without_autocast(H):
            A_m, A_r, B = self.coefficients(precise(H))
            h = (A_m.unsqueeze(-1) * H).sum(-2).to(H.dtype)  # (B, N, C)
            mixed = A_r.transpose(-2, -1) @ precise(H)  # (B, N, n, C)
        return (mixed + B.unsqueeze(-1) * F(h).unsqueeze(-2)).to(H.dtype)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("hyper_connections", options, streams=(2, 64))

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        n = options["streams"]
        return 2 * (3 * n + 2 + (n + 1) / layers)
