"""A learned number, or one per head, that several designs multiply by or add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Gain", "HeadScale", "Shift"]


class Gain(nn.Module):
    """x -> a x, with one learned number a for all channels, which starts at ``initial``."""

    def __init__(self, initial: float):
        super().__init__()
        self.initial, self.gain = initial, nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Shift(nn.Module):
    """x -> x + b, with one learned number b for all channels, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class HeadScale(nn.Module):
    """A learned gain per head on the output of the attention, before its projection: (B, N, H·D) -> (B, N, H·D)."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (len(self.gain), -1)) * self.gain[:, None]  # (B, N, H, D)
        return heads.flatten(-2)
