r"""DeepCrossAttention: Heddes et al., arXiv 2502.06785, Sec. 3.1 (GRN-v3) and 3.2.

    G_t = [f_{t-1}, …, f_1, x]                              x: the start of the stream, f_i: what block i has added
    GRN(G) = (G ⊙ (b + w̄)) 1,   w̄ = 1 σ(w^T G)              G, b: (C, t), w: (C, 1), σ: ReLU, per token
    q = GRN_q(G_t),  k = GRN_k(G_t),  v = GRN_v(G_t)        (B, N, C), the inputs of block t's attention
    f_t = A + MLP(q + A),   A = Attention(q, k, v)

With ``last`` = k the sources are x, the sum of the f in between, and the last k f (k-DCA). The end of the stream is
y = GRN(G_{T+1}), as in Sec. 4.1. Each of q, k, v goes through the block's own norm.

Start: b = 1 and w = 0, which is the plain network. ReLU's derivative at 0 is commonly taken as 0, which would keep w
at 0 forever; here it is ½, so that w learns from the paper's start. We read the paper's text without its figures. It
leaves open which of the inputs is added to that of the MLP (ours: that of the queries), whether attention and MLP count
as separate sources (ours: a block is one source; the paper's count of parameters is larger than ours), and whether k
and v have norms of their own.

Parameters: 3 (t + 1) C in block t, which has t sources, and (T + 2) C at the end. MACs per token: 3 t C in block t for
w, and (T + 1) C at the end; as many for the sums (here twice that), which the count leaves out. With affine LayerNorms,
the count has 10 C more per block, for two more inputs. Traffic: t read and 3 written in block t, 6 around the MLP;
T + 1 read and 1 written at the end; with ``last``, 3 whenever a source joins those in between. Memory: all f_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import MOST_BLOCKS
from .branches import BranchParts
from .design import (
    Branch,
    Connection,
    Place,
    Wiring,
    check_bounds,
    check_sources,
    precise,
    without_autocast,
)
from .separate_inputs import check_separable, separate
from .source_sum import Sources, SourceSum

__all__ = ["DeepCrossAttention"]


class _GRN(SourceSum):
    """Several weighted sums of the same sources: t of (B, N, C) -> ``outputs`` of (B, N, C)."""

    widens = True

    def __init__(self, width: int, sources: int, outputs: int):
        super().__init__()
        self.sources, self.outputs = sources, outputs
        self.b = nn.Parameter(torch.empty(sources * outputs * width))  # flat: gains have no weight decay
        self.w = nn.Parameter(torch.empty(width, outputs))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.ones_(self.b)
        nn.init.zeros_(self.w)

    def forward(self, G: Sequence[Tensor]) -> list[Tensor]:
        sums = self.sum_up(G, each=[self.b.view(self.sources, self.outputs, -1)], shared=[self.w])
        return [total.to(G[0].dtype) for total in sums]

    @staticmethod
    def add(sources: Sources, total: list[Tensor] | None, b: Tensor, w: Tensor) -> list[Tensor]:  # type: ignore[override]
        sums = total
        for f, b_f in zip(map(precise, sources), precise(b).unbind()):  # b_f: (outputs, C)
            scores = f @ precise(w)  # (B, N, outputs)
            dynamic = torch.maximum(scores, torch.zeros_like(scores))  # relu, but with a gradient at 0
            # not f (b + w̄), which would keep b + w̄ for the gradient
            terms = [f * b_o + f * s.unsqueeze(-1) for b_o, s in zip(b_f.unbind(), dynamic.unbind(-1))]
            sums = terms if sums is None else [so_far + term for so_far, term in zip(sums, terms)]
        assert sums is not None  # there is a source
        return sums


class _WithOutputs(Wiring):
    """State: G, from x to the newest f."""

    grows = True

    def __init__(self, width: int, layers: int, options: Mapping[str, Any]):
        super().__init__(width, layers, options)
        self.grn = _GRN(width, sources(layers + 1, options["last"]), 1)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.contiguous(),)  # many blocks read it

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        with without_autocast(state[0]):
            return self.grn(state)[0]


class DeepCrossAttention(Connection):
    title = "queries, keys and values from learned sums of all blocks' outputs"
    source = "arXiv 2502.06785, Sec. 3"
    unit = "branches"
    wiring = _WithOutputs
    options = {"last": 0}  # noqa: RUF012 - 0: all
    needs = ("norm", "projections")
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.last = options["last"]
        self.grn = _GRN(place.width, sources(place.layer, self.last), 3)

    def forward(self, state: tuple[Tensor, ...], branches: Sequence[Branch]) -> tuple[Tensor, ...]:
        check_sources(len(state), self.grn.sources)
        attention, *others = branches
        with without_autocast(state[0]):
            q, k, v = self.grn(state)
        added = attention.attend(q, k, v).to(q.dtype)
        for F in others:
            added = added + F(q + added)
        if self.last and len(state) == self.last + 2:
            x, between, oldest, *newer = state
            return x, between + oldest, *newer, added
        return (*state, added)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("deep_cross_attention", options, last=(0, MOST_BLOCKS))

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        check_separable("deep_cross_attention", block, parts)

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        separate(block, parts)

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        read, last = [sources(t, options["last"]) for t in range(1, layers + 2)], options["last"]
        summed = read[:-1].count(last + 2) if last else 0  # blocks after which one more source joins those in between
        return (sum(read) + (3 + 6) * layers + 3 * summed + 1) / layers


def sources(t: int, last: int) -> int:
    """How many tensors block t reads."""
    return min(t, last + 2) if last else t
