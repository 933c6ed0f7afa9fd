r"""MUDD, multiway dynamic dense connections: Xiao et al., arXiv 2502.12170, Eqs. 5 to 8 and 10, Appendix B.

    X_i = X_A + MLP(X_A),   X_A = Attention(X̄^Q_{i-1}, X̄^K_{i-1}, X̄^V_{i-1}) + X̄^R_{i-1}
    X̄^c_i = Σ_{j ≤ i} A^c_ij X_j,   [A^Q_i, A^K_i, A^V_i, A^R_i] = GELU(RMSNorm(X_i) W_1) W_2 + a_i

X, X̄: (B, N, C), X_0 = X̄^c_0: the start of the stream, A^c_i: (B, N, i + 1), W_1: (C, K), W_2: (K, 4 (i + 1)),
a_i: 4 (i + 1), K = 4 (i + 1). The end of the stream is X̄^R_L, so the last block has only that sum, with the same K.
RMSNorm has no weight, since it would only multiply W_1. Queries, keys and values share the block's norm; weights of
separate norms (Fig. 2e) would only multiply the projections after them.

With ``prepost_norm`` (Eq. 10, for deep and narrow models): X̄^c_i = X_i + RMSNorm(Σ_j A^c_ij RMSNorm(X_j)), each
RMSNorm with a weight. The paper's MLPs that grow with depth (Eq. 9) are not part of this.

Start: W_1 is normal with a variance of 1/C, W_2 = 0, a_ii = 1 and the rest of a is 0, which is the plain network; with
``prepost_norm``, a = 0, and the weights of the inner and outer RMSNorms are 1 and 0.001. Parameters after block i:
C K + K 4 (i + 1) + 4 (i + 1), and those norms. MACs per token: as many without a, and 4 (i + 1) C for the sums, which
the count leaves out; with affine LayerNorms, it has 10 C more per block, for two more inputs. Traffic per block:
6 as plain, i + 1 read and 4 written, 1 after the last block; with ``prepost_norm`` the normed X_i is written as well.
Memory: all X_i and four X̄.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .branches import BranchParts
from .design import (
    Branch,
    Connection,
    DesignPart,
    Place,
    Wiring,
    check_sources,
    precise,
    rms_norm,
    set_start,
    without_autocast,
)
from .separate_inputs import check_separable, separate
from .source_sum import Sources, SourceSum

__all__ = ["MUDD"]

WAYS = 4  # Q, K, V, R


class _RMSNorm(DesignPart):
    """RMSNorm with a weight, which starts at ``initial``; in float32."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.initial, self.weight = initial, nn.Parameter(torch.empty(width))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.constant_(self.weight, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) * precise(self.weight)


class _WithSums(Wiring):
    """State: (X_0, …, X_i, X̄^Q, X̄^K, X̄^V, X̄^R); with ``prepost_norm`` the X are normed."""

    grows = True

    def __init__(self, width: int, layers: int, options: Mapping[str, Any]):
        super().__init__(width, layers, options)
        self.pre = _RMSNorm(width, 1.0) if options["prepost_norm"] else None

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.contiguous()  # many blocks read it
        if self.pre is None:
            return x, x, x, x, x
        with without_autocast(x):
            return self.pre(x).to(x.dtype), x, x, x, x

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[-1]


class MUDD(SourceSum, Connection):
    title = "queries, keys, values and stream from dynamic sums of all blocks' outputs"
    source = "arXiv 2502.12170, Eqs. 5-8"
    unit = "branches"
    wiring = _WithSums
    options = {"prepost_norm": False}  # noqa: RUF012
    needs = ("norm", "projections")
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.ways = 1 if place.layer == place.layers else WAYS
        sources, width = place.layer + 1, place.width
        self.W_1 = nn.Parameter(torch.empty(width, WAYS * sources))
        self.W_2 = nn.Parameter(torch.empty(WAYS * sources, self.ways * sources))
        self.a = nn.Parameter(torch.empty(self.ways * sources))
        self.pre, self.post = None, None
        if options["prepost_norm"]:
            self.pre = _RMSNorm(width, 1.0)
            self.post = nn.ModuleList(_RMSNorm(width, 1e-3) for _ in range(self.ways))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.W_1, std=self.place.width**-0.5)
        nn.init.zeros_(self.W_2)
        a = torch.zeros(self.ways, self.a.numel() // self.ways)
        if self.pre is None:
            a[:, -1] = 1.0
        set_start(self.a, a.view(self.a.shape))

    def forward(self, state: tuple[Tensor, ...], branches: Sequence[Branch]) -> tuple[Tensor, ...]:
        *X, Q, K, V, R = state
        check_sources(len(X), self.place.layer)
        attention, *others = branches
        x = R + attention.attend(Q, K, V)
        for F in others:
            x = x + F(x)
        with without_autocast(x):
            X.append(x if self.pre is None else self.pre(x).to(x.dtype))
            sums = self.aggregate(x, X)
        if self.ways == 1:
            sums = [*[x] * (WAYS - 1), *sums]  # nothing reads the first three
        return (*X, *sums)

    def aggregate(self, x: Tensor, X: Sequence[Tensor]) -> list[Tensor]:
        """X_i, and X_0 … X_i -> X̄^c_i, each (B, N, C)."""
        A = functional.gelu(rms_norm(x) @ precise(self.W_1)) @ precise(self.W_2) + precise(self.a)
        A = A.unflatten(-1, (self.ways, len(X))).movedim(-1, 0).contiguous()  # (i + 1, B, N, ways)
        sums = self.sum_up(X, each=[A])
        if self.post is not None:
            sums = [x + norm(total) for norm, total in zip(self.post, sums)]
        return [total.to(x.dtype) for total in sums]

    @staticmethod
    def add(sources: Sources, total: list[Tensor] | None, A: Tensor) -> list[Tensor]:  # type: ignore[override]
        sums: list[Tensor] = []
        for way, weights in enumerate(A.unbind(-1)):  # (sources, B, N)
            so_far: Any = None if total is None else total[way]
            for X_j, weight in zip(sources, weights.unsqueeze(-1).unbind()):
                so_far = weight * X_j if so_far is None else so_far + weight * X_j
            sums.append(so_far)
        return sums

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        check_separable("mudd", block, parts)

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        separate(block, parts)

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        total = sum(i + 1 + (1 if i == layers else WAYS) for i in range(1, layers + 1))
        # X_0 is read and written normed; after all blocks but the last, the normed X_i is written besides the sums
        normed = 2 + layers - 1 if options["prepost_norm"] else 0
        return 6.0 + (total + normed) / layers
