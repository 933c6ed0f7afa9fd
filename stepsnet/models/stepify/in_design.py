"""The streams of a model that stepify has made, joined by a design of stepsnet.residual."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import UserError
from ...residual.joining import connect_steps
from .containers import Container
from .replace_blocks import sequence_at

__all__ = ["put_in_design"]


def put_in_design(
    model: nn.Module, found: Sequence[Container], chosen: Collection[str], residual: str, options: Mapping[str, Any]
) -> None:
    """Join the steps of a model's chosen containers by a design, in place.

    Each step of a container is a stream of its own. Blocks are numbered across all containers that were found, for
    designs that scale by a block's place.

    Raises:
        UserError: blocks or widths that the design does not support.
    """
    sequences = {one.path: sequence_at(model, one) for one in found}
    total, first = sum(sum(sequence.depths) for sequence in sequences.values()), 1
    for path, sequence in sequences.items():
        if path in chosen:
            try:
                connect_steps(sequence, residual, options, first, total)
            except UserError as error:
                raise UserError(f"stepify: {path or 'the model'}: {error}") from error
        first += sum(sequence.depths)
