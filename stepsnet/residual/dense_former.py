r"""DenseFormer: Pagliardini et al., "Enhancing Information Flow … via Depth Weighted Averaging", arXiv 2402.02622.

    X_i = Block_i(Y_{i-1}),   Y_i = Σ_{j ≤ i} α_{i,j} X_j,   X_0 = Y_0: the start of the stream        X, Y: (B, N, C)

With ``dilation`` k, only those X_j count whose j differs from i by a multiple of k; with ``period`` p, the sum is taken
after every p-th block, and otherwise Y_i = X_i (Sec. 3). Start: α_{i,i} = 1 and all others 0, which is the plain
network. Parameters: i + 1 after block i. Traffic: that of the plain stream, and i + 1 read and 1 written after block i.
Memory: all X, and a copy of each that a block reads as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import MOST_BLOCKS
from .design import Branch, Connection, Place, Wiring, check_bounds, check_sources, set_start
from .source_sum import Sources, SourceSum

__all__ = ["DenseFormer"]


class _WithHistory(Wiring):
    """State: (X_0, …, X_i, Y_i)."""

    grows = True

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.contiguous()  # many blocks read it
        return x, x

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[-1]


class DenseFormer(SourceSum, Connection):
    title = "behind each block a learned sum of all blocks' outputs"
    source = "arXiv 2402.02622, Sec. 3"
    unit = "block"
    wiring = _WithHistory
    options = {"dilation": 1, "period": 1}  # noqa: RUF012
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.sources = _sources(place.layer, options)  # j of α_{i,j}, the last is i
        self.alpha = nn.Parameter(torch.empty(len(self.sources))) if self.sources else None
        self.init_weights()

    def init_weights(self) -> None:
        if self.alpha is not None:
            set_start(self.alpha, torch.eye(len(self.alpha))[-1])

    def forward(self, state: tuple[Tensor, ...], F: Branch) -> tuple[Tensor, ...]:
        *X, Y = state
        check_sources(len(X), self.place.layer)
        X.append(F(Y.clone() if Y is X[-1] else Y))  # the block may add in place, and X is summed again
        Y = X[-1]
        if self.alpha is not None:
            Y = self.sum_up([X[j] for j in self.sources], each=[self.alpha])
        return (*X, Y)

    @staticmethod
    def add(sources: Sources, total: Tensor | None, alpha: Tensor) -> Tensor:  # type: ignore[override]
        for alpha_j, X_j in zip(alpha.unbind(), sources):
            total = alpha_j * X_j if total is None else total + alpha_j * X_j
        assert total is not None  # there is a source
        return total

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("dense_former", options, dilation=(1, MOST_BLOCKS), period=(1, MOST_BLOCKS))

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        behind = [len(_sources(i, options)) for i in range(1, layers + 1)]
        return 6.0 + sum(count + 1 for count in behind if count) / layers


def _sources(i: int, options: Mapping[str, Any]) -> list[int]:
    if i % options["period"]:
        return []
    return [j for j in range(i + 1) if (i - j) % options["dilation"] == 0]
