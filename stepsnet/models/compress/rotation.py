"""What the blocks of a trained network read, write and activate, and the rotation that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from .around import Around, branches

__all__ = ["Statistics", "greedy_rotation", "run", "watch"]


@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens of the calibration, in float64.

    Args:
        moments: (C, C) of each block: second moments of what its branches read behind the norm, and of what they write
            in units of the stream's RMS, each with trace 1.
        inner: for each block and branch, (K, K): second moments of what its last layer reads.
    """

    moments: list[Tensor]
    inner: list[list[Tensor]]


class _Watched:
    """One branch, while batches run through the network."""

    def __init__(self, block: nn.Module, parts: Any):
        norm, last = block.get_submodule(parts.norm), block.get_submodule(parts.last)
        self.sums: dict[str, Tensor] = {}
        self.size: Tensor | None = None  # RMS of the stream in front of the branch, (…, 1)
        self.hooks = [
            norm.register_forward_hook(self._read),
            last.register_forward_pre_hook(lambda layer, args: self._add("inner", args[0])),
            last.register_forward_hook(lambda layer, args, output: self._add("written", output / self.size)),
        ]

    def _read(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self.size = args[0].float().square().mean(-1, keepdim=True).sqrt()
        self._add("read", output)

    def _add(self, name: str, values: Tensor) -> None:
        rows = values.flatten(0, -2).double()
        self.sums[name] = self.sums.get(name, 0.0) + (rows.T @ rows).cpu()

    def moment(self) -> Tensor:
        return torch.stack([self.sums[name] / self.sums[name].trace() for name in ("read", "written")]).sum(0)


@torch.no_grad()
def watch(model: Any, parts: Around, batches: Iterable[Tensor]) -> Statistics:
    """Raises UserError where there is no batch, or one that the model does not take."""
    watched = [[_Watched(block, one) for one in branches(block)] for block in parts.blocks]
    device, seen = next(model.parameters()).device, 0
    try:
        for batch in batches:
            seen += len(batch)
            run(model, batch.to(device))
    except (RuntimeError, IndexError, AssertionError, TypeError, AttributeError) as error:
        raise UserError(f"calibration: the model does not take it: {str(error).splitlines()[0]}") from error
    finally:
        for handle in (handle for block in watched for one in block for handle in one.hooks):
            handle.remove()
    if not seen:
        raise UserError("calibration: got no inputs, expected some thousand")
    moments = [torch.stack([one.moment() for one in block]).sum(0) for block in watched]
    if not all(moment.isfinite().all() for moment in moments):
        raise UserError("calibration: got outputs that are not finite, expected a trained model and its inputs")
    return Statistics(moments, [[one.sums["inner"] for one in block] for block in watched])


def run(model: Any, inputs: Tensor) -> Tensor:
    """Images (B, C, H, W) -> logits (B, classes), or token ids (B, N) -> logits (B, N, tokens)."""
    if hasattr(model, "config"):
        return model(input_ids=inputs, use_cache=False).logits
    return model(inputs)


def greedy_rotation(moments: Sequence[Tensor], widths: Sequence[int], depths: Sequence[int]) -> Tensor:
    """(C, C) orthogonal: step by step the leading directions of its blocks in the complement of those before."""
    width = widths[-1]
    found, first = torch.zeros(width, 0, dtype=torch.float64), 0
    for c, depth in zip(widths, depths):
        moment = sum(moments[first : first + depth], torch.zeros(width, width, dtype=torch.float64))
        first += depth
        outside = torch.eye(width, dtype=torch.float64) - found @ found.T
        _, vectors = torch.linalg.eigh(outside @ moment @ outside)  # ascending
        new = vectors[:, width - (c - found.shape[1]) :].flip(1)
        found = torch.linalg.qr(torch.cat((found, outside @ new), 1))[0]
    return found
