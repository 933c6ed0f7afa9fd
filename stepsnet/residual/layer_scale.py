r"""LayerScale: Touvron et al., "Going deeper with Image Transformers", arXiv 2103.17239, Eq. 4.

    x_{l+1} = x_l + diag(λ_l) F_l(x_l)        x, F(x): (B, N, C), λ: (C)

Start: λ = 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 beyond (Sec. 3), or ``initial``. Parameters: C per branch. MACs:
C per token and branch, which the count of matrix products leaves out. Traffic: as in the plain stream, if the product
is fused with the sum. Memory: F(x), kept for the gradient of λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .design import Branch, Connection, Place, check_bounds

__all__ = ["LayerScale"]


class LayerScale(Connection):
    title = "a learned gain per channel of each branch, which starts small (0: by depth)"
    source = "arXiv 2103.17239, Eq. 4"
    scales_branches = True
    options = {"initial": 0.0}  # noqa: RUF012 - 0: the paper's by depth

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        self.start = options["initial"] or self.initial(place.blocks)
        self.gain = nn.Parameter(torch.empty(place.width))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + self.gain * F(x)

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        check_bounds("layer_scale", options, initial=(0, 1e3))

    @staticmethod
    def initial(num_blocks: int) -> float:
        return 0.1 if num_blocks <= 18 else 1e-5 if num_blocks <= 24 else 1e-6
