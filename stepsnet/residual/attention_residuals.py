r"""Attention Residuals: Kimi Team, arXiv 2603.15031, full and in blocks of layers.

    h_l = Σ_i α_{i→l} v_i,   α_{·→l} = softmax_i(w_l · RMSNorm(v_i))        v, h: (B, N, C), w: (C)

Full: v_0 is the start of the stream and v_i = F_i(h_i) the output of layer i; layer l reads v_0 … v_{l-1}. In blocks:
the layers are divided into at most ``groups`` groups of equal size, the last of which may be smaller (12 layers in 8
groups: 6 of 2), and outputs are added up within each group; layer l reads v_0, the sums of the groups before its own
and, unless it is the first of its group, the sum of its own group so far. The end of the stream is read in the same
way, with a w of its own. RMSNorm has no weight, since it would only multiply w.

Start: w = 0, so that h is the mean of all v that are read, which is their sum up to a factor. A norm in front of a
branch cancels that factor but for its ε, and so does the norm after the stream: the network starts as the plain one if
its stream ends in a norm and is well above that norm's ε. The stream itself is divided by the number of v, even if all
branches are silent; in a StepsNet its channels are then smaller than those that wait. Parameters: C per branch except
the first, and C at the end. MACs per token and branch: C for each v that is read, for w_l · v, and as many for the sum,
which the count of matrix products leaves out. Traffic, for all layers but the first, and for the end: these v are read
and h is written; adding to the sum of a group takes 3. Memory: all v; in the second form those of the groups, not of
all layers. In training its partial sums are kept too: 17 tensors of (B, N, C) more than in the plain network with one
group in 8 blocks, and 23 more in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import MOST_BLOCKS
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
from .source_sum import Sources, SourceSum

__all__ = ["AttentionResiduals", "BlockAttentionResiduals"]

# Σ e v (B, N, C) and z = Σ e, where e = exp(logit - top), and the top logit (B, N, 1), whose gradient is 0
Total = tuple[Tensor, Tensor, Tensor]


class _Query(SourceSum):
    """Several v of (B, N, C) -> Σ α_i v_i of (B, N, C)."""

    widens = True

    def __init__(self, width: int):
        super().__init__()
        self.w = nn.Parameter(torch.empty(width))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.zeros_(self.w)

    def forward(self, sources: Sources) -> Tensor:
        if self.at_once(sources):
            h = self.run(_attend, sources, self.w)
        else:
            total, z, _ = self.sum_up(sources, shared=[self.w])
            h = total / z
        return h.to(sources[0].dtype)

    @staticmethod
    def add(sources: Sources, total: Total | None, w: Tensor) -> Total:  # type: ignore[override]
        V = tuple(map(precise, sources))
        logits = _logits(V, w)
        top = logits.detach().amax(-1, keepdim=True)
        if total is not None:
            top = torch.maximum(top, total[2])
        e = (logits - top).exp()
        h, z = _weighted(V, e), e.sum(-1, keepdim=True)
        if total is not None:
            before = (total[2] - top).exp()
            h, z = h + before * total[0], z + before * total[1]
        return h, z, top


def _attend(sources: Sources, w: Tensor) -> Tensor:
    V = tuple(map(precise, sources))
    return _weighted(V, _logits(V, w).softmax(-1))


def _logits(V: Sources, w: Tensor) -> Tensor:
    """w · RMSNorm(v) for each v, (B, N, sources)."""
    return torch.stack([_dot(v, precise(w)) * torch.rsqrt(v.square().mean(-1) + 1e-6) for v in V], -1)


def _dot(v: Tensor, w: Tensor) -> Tensor:
    """v @ w; compiled as a sum, so that it is fused into the kernel that reads v anyway."""
    in_a_kernel = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return (v * w).sum(-1) if in_a_kernel else v @ w


def _weighted(V: Sources, weights: Tensor) -> Tensor:
    h = weights[..., :1] * V[0]
    for i, v in enumerate(V[1:], 1):
        h = h + weights[..., i : i + 1] * v
    return h


class _WithSources(Wiring):
    """State: (v_0, …), what the next layer reads."""

    grows = True

    def __init__(self, width: int, layers: int, options: Mapping[str, Any]):
        super().__init__(width, layers, options)
        self.query = _Query(width)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.contiguous(),)  # all layers read it

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        with without_autocast(state[0]):
            return self.query(state)

    def as_sum(self, state: tuple[Tensor, ...]) -> Tensor:
        return self.finish(state) * len(state)


class AttentionResiduals(Connection):
    title = "each layer attends to the outputs of all layers before"
    source = "arXiv 2603.15031"
    wiring = _WithSources
    starts_as_plain = True

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.query = _Query(place.width) if place.layer > 1 else None  # the first layer has only one v to read
        size = self.group_size(place.layers, options)
        self.begins_group = (place.layer - 1) % size == 0
        self.sources = 1 + math.ceil((place.layer - 1) / size)  # how many the layer reads

    def forward(self, state: tuple[Tensor, ...], F: Branch) -> tuple[Tensor, ...]:
        check_sources(len(state), self.sources)
        h = state[0]
        if self.query is not None:
            with without_autocast(h):
                h = self.query(state)
        v = F(h).to(h.dtype)  # sums within a group are taken at the stream's precision
        return (*state, v) if self.begins_group else (*state[:-1], state[-1] + v)

    @classmethod
    def group_size(cls, layers: int, options: Mapping[str, Any]) -> int:
        return 1

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        size = cls.group_size(layers, options)
        # the first layer reads the start as it is; the end is read as by one more layer
        weighed = [1 + math.ceil((layer - 1) / size) for layer in range(2, layers + 2)]
        added = sum((layer - 1) % size > 0 for layer in range(1, layers + 1))
        return 2 * (sum(weighed) + len(weighed) + 3 * added) / layers


class BlockAttentionResiduals(AttentionResiduals):
    title = "each layer attends to sums over groups of layers"
    options = {"groups": 8}  # noqa: RUF012

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("attention_residuals_block", options, groups=(1, MOST_BLOCKS))

    @classmethod
    def group_size(cls, layers: int, options: Mapping[str, Any]) -> int:
        return math.ceil(layers / options["groups"])
