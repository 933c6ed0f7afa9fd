"""Separate inputs for the queries, keys and values of an attention, in unmodified blocks of timm and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UserError
from .branches import BranchParts

__all__ = ["LinearOfSeveral", "check_separable", "separate"]


class LinearOfSeveral(nn.Linear):
    """An ``nn.Linear`` with the same weights in which each equal part of the output may have an input of its own."""

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
    """Raise UserError unless the inputs of a block's first branch can be separated.

    It has to be an attention of ``nn.Linear`` layers, each part of whose outputs is its queries, keys or values.
    ``name`` is that of the design.
    """
    kind, first = type(block).__name__, parts[0]
    if first.projections is None:
        raise UserError(f"residual: {name}: the first branch of {kind} is not declared as an attention, expected one")
    if first.function is not None:
        raise UserError(f"residual: {name}: got the attention of {kind} as a function, expected the path of its layer")
    layers = [attrgetter(path)(block) for path, _, _ in first.projections]
    for (path, _, count), layer in zip(first.projections, layers):
        if type(layer) is not nn.Linear:
            raise UserError(f"residual: {name}: {path} of {kind}: got {type(layer).__name__}, expected Linear")
        own = sorted(part for (_, part, _), other in zip(first.projections, layers) if other is layer)
        if own != list(range(count)):
            raise UserError(f"residual: {name}: {path} of {kind}: got the parts {own} of {count}, expected each once")


def separate(block: nn.Module, parts: Sequence[BranchParts]) -> None:
    """Make the first branch of a checked block take separate inputs, in place: :meth:`BoundBranch.attend`."""
    for path in {path for path, _, _ in parts[0].projections or ()}:
        block.get_submodule(path).__class__ = LinearOfSeveral
