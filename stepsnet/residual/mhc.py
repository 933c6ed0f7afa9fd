r"""mHC, manifold-constrained Hyper-Connections: Xie et al., arXiv 2512.24880, Eqs. 3 and 7 to 9.

    x_{l+1} = H_res x_l + H_post^T F(H_pre x_l)        x: n streams, (B, N, n, C), H_pre, H_post: (1, n), H_res: (n, n)

    x' = RMSNorm(vec(x))                               vec(x): (B, N, nC)
    H̃ = α (x' φ) + b, for each of the three            φ_pre, φ_post: (nC, n), φ_res: (nC, n²), α: a number, b as H
    H_pre = σ(H̃_pre),   H_post = 2 σ(H̃_post),   H_res = Sinkhorn-Knopp(H̃_res)

Sinkhorn-Knopp takes exp and then scales columns and rows in turn to sum to 1, 20 times, so that H_res is doubly
stochastic and preserves the mean of the streams. RMSNorm's weight is part of φ (Sec. 4.3.1); coefficients are in
float32. The streams start as copies and end in their mean, which the last H_res does not affect: its columns sum to 1.

Start: α = 0.01 (Table 5 of the paper). The paper gives no start for b and φ; ours make the network nearly the plain
one: H_pre = 1/n, H_post = 1, b_res = 0 on the diagonal and -8 elsewhere, so that H_res is within 0.002 of I; φ is
normal with standard deviation 0.02. φ must not be 0: equal streams with equal coefficients would have equal gradients,
and stay equal forever. Parameters per branch: (n² + 2n)(nC + 1) + 3. MACs per token and branch:
(n² + 2n) n C + n² C + 2 n C. Traffic per branch: n read and 1 written for F's input, n + 1 read and n written for the
streams; n + 1 for the mean at the end. Memory: n streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .design import Branch, Connection, Place, check_bounds, precise, rms_norm, set_start, without_autocast
from .streams import Streams

__all__ = ["MHC", "sinkhorn_knopp"]


class _Scalings(torch.autograd.Function):
    """Scale columns and rows in turn. For the backward pass, only the sums and the result are kept.

    y = x / s with s = Σ x gives x = y s and ∂x = (∂y - Σ ∂y y) / s; autograd would keep every intermediate matrix.
    """

    @staticmethod
    def forward(ctx: Any, K: Tensor, scalings: int) -> Tensor:
        """K: (n, n, tokens), whose columns sum to 1; rows are scaled first."""
        M, sums = K, []
        for index in range(scalings):
            sums.append(M.sum((index + 1) % 2, keepdim=True))
            M = M / sums[-1]  # not in place: compiled by torch 2.11, that gives a gradient of 0
        ctx.save_for_backward(M, *sums)
        return M

    @staticmethod
    @once_differentiable  # the sums are not outputs: a second derivative would take them for constants
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        M, *sums = ctx.saved_tensors
        M, g = M.clone(), gradient.clone()
        for index in reversed(range(len(sums))):
            g -= (g * M).sum((index + 1) % 2, keepdim=True)
            g /= sums[index]
            M *= sums[index]
        return g, None


def sinkhorn_knopp(logits: Tensor, iterations: int) -> Tensor:
    """(…, n, n) -> doubly stochastic matrices (…, n, n), by Eq. 9.

    The first scalings are done on logarithms, so that nothing overflows and no row is 0: after them, every sum is at
    least 1/n². Internally, tokens are the last dimension, so that a sum over four numbers adds four rows of tokens; on
    a CPU this is four times as fast.
    """
    L = logits.flatten(0, -3).movedim(0, -1).contiguous().log_softmax(0)  # (n, n, tokens), columns sum to 1
    if iterations == 1:
        M = L.softmax(1)
    else:
        scalings = 1 if logits.is_meta else 2 * iterations - 3  # without values there is nothing to scale again
        M = _Scalings.apply(L.log_softmax(1).softmax(0), scalings)
    return M.movedim(-1, 0).contiguous().unflatten(0, logits.shape[:-2])


class MHC(Connection):
    title = "several streams, mixed by doubly stochastic matrices"
    source = "arXiv 2512.24880, Eqs. 3, 7-9"
    wiring = Streams
    options = {"streams": 4, "iterations": 20}  # noqa: RUF012

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.n, self.iterations = options["streams"], options["iterations"]
        coefficients = self.n * (self.n + 2)  # of H_pre, H_post and H_res side by side
        self.phi = nn.Parameter(torch.empty(self.n * place.width, coefficients))
        self.alpha = nn.Parameter(torch.empty(3))
        self.b = nn.Parameter(torch.empty(coefficients))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.phi, std=0.02)
        nn.init.constant_(self.alpha, 0.01)
        pre = torch.full((self.n,), -math.log(self.n - 1))  # its σ is 1/n
        set_start(self.b, torch.cat([pre, torch.zeros(self.n), 8 * (torch.eye(self.n) - 1).flatten()]))

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (B, N, n, C) -> H_pre (B, N, n), H_post (B, N, n), H_res (B, N, n, n)."""
        sizes = [self.n, self.n, self.n**2]
        dynamic = (rms_norm(x.flatten(-2)) @ precise(self.phi)).split(sizes, -1)
        static = precise(self.b).split(sizes)
        pre, post, res = (alpha * h + b for alpha, h, b in zip(precise(self.alpha), dynamic, static))
        return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn_knopp(res.unflatten(-1, (self.n, self.n)), self.iterations)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        with without_autocast(x):
            H_pre, H_post, H_res = self.coefficients(x)
            h = (H_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)  # (B, N, C)
            mixed = H_res @ precise(x)  # (B, N, n, C)
        return (mixed + H_post.unsqueeze(-1) * F(h).unsqueeze(-2)).to(x.dtype)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("mhc", options, streams=(2, 64), iterations=(1, 1000))

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float:
        n = options["streams"]
        return 2 * (3 * n + 2 + (n + 1) / layers)
