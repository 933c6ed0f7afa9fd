"""Queries, keys and values of an attention from inputs of their own, in blocks of timm and transformers as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UserError
from .branches import BranchParts

__all__ = ["LinearOfSeveral", "check_separable", "separate"]


class LinearOfSeveral(nn.Linear):
    """An ``nn.Linear`` with the same weights, each equal part of whose output may have an input of its own."""

    inputs: tuple[Tensor, ...] | None = None  # one for each part, while the branch runs

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.inputs
        if inputs is None:
            return super().forward(x)
        weights = self.weight.chunk(len(inputs))
        biases = [None] * len(inputs) if self.bias is None else self.bias.chunk(len(inputs))
        outputs = [functional.linear(one, weight, bias) for one, weight, bias in zip(inputs, weights, biases)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def check_separable(name: str, block: nn.Module, parts: Sequence[BranchParts]) -> None:
    """Raises UserError where a block's first branch is no attention of linear layers; ``name`` is the design's."""
    kind = type(block).__name__
    if parts[0].projections is None:
        raise UserError(f"residual: {name} expects the attention as a block's first branch, which {kind} has not")
    for path, _, _ in parts[0].projections:
        layer = dict(block.named_modules()).get(path)
        if type(layer) is not nn.Linear:
            got = "none" if layer is None else type(layer).__name__
            raise UserError(f"residual: {name}: {path} of {kind}: got {got}, expected Linear")


def separate(block: nn.Module, parts: Sequence[BranchParts]) -> None:
    """Let the first branch of a checked block, in place, take inputs apart: :meth:`BoundBranch.attend`."""
    for path in {path for path, _, _ in parts[0].projections or ()}:
        block.get_submodule(path).__class__ = LinearOfSeveral
