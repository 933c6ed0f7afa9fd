"""Several streams side by side, as in Hyper-Connections and AltUp."""

from __future__ import annotations

from torch import Tensor

from .design import Wiring

__all__ = ["Streams"]


class Streams(Wiring):
    """State: n streams (B, N, n, C), which start as copies of x and end in their mean."""

    def start(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.options["streams"], x.shape[-1])

    def finish(self, state: Tensor) -> Tensor:
        return state.mean(-2)

    def may_be(self, state: Tensor) -> bool:
        return state.shape[-2] == self.options["streams"]

    def gradient_of_stream(self, gradient: Tensor) -> Tensor:
        return gradient.sum(-2)  # a shift of the stream shifts all n alike
