"""What the blocks of a trained network read, write and activate, and the rotation that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...residual.branches import BranchParts
from .stream_parts import StreamParts, branches

__all__ = ["Statistics", "greedy_rotation", "run", "watch"]

_BATCH = 64


@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens of the calibration.

    Args:
        moments: (C, C) for each block: the sum of the second moments of what its branches read after the norm, and of
            what they write in units of the stream's RMS, each scaled to trace 1.
        inner: for each block and branch, second moments of what its last layer reads: (H, D, D) for an attention with
            H heads of D channels, (K,) for an MLP with K hidden units.
    """

    moments: list[Tensor]
    inner: list[list[Tensor]]


class _Reads:
    """Sums up what one branch reads and writes while batches run through the network."""

    def __init__(self, block: nn.Module, parts: BranchParts):
        norm, last = block.get_submodule(parts.norm), block.get_submodule(parts.last)
        attention: Any = block.get_submodule(parts.layer)
        self.head_size = attention.head_dim if parts.projections else None
        self.sums: dict[str, Tensor] = {}
        self.size = torch.empty(0)  # RMS of the stream in front of the branch, (…, 1)
        self.hooks = [
            norm.register_forward_hook(self._read),
            last.register_forward_pre_hook(lambda layer, args: self._activated(args[0])),
            last.register_forward_hook(lambda layer, args, output: self._written(output)),
        ]

    def _read(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self.size = args[0].float().square().mean(-1, keepdim=True).sqrt()
        self._add("read", _second(output.float().flatten(0, -2)))

    def _activated(self, values: Tensor) -> None:
        rows = values.float().flatten(0, -2)  # (T, K)
        if self.head_size is None:
            self._add("inner", rows.square().sum(0))
        else:
            heads = rows.unflatten(-1, (-1, self.head_size))  # (T, H, D)
            self._add("inner", torch.einsum("thd,the->hde", heads, heads))

    def _written(self, output: Tensor) -> None:
        relative = torch.where(self.size > 0, output / self.size, 0.0)  # padding may have a stream of zeros
        self._add("written", _second(relative.float().flatten(0, -2)))

    def _add(self, name: str, found: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + found.cpu().double()

    def moment(self) -> Tensor:
        return torch.stack([self.sums[name] / self.sums[name].trace() for name in ("read", "written")]).sum(0)


def _second(rows: Tensor) -> Tensor:
    return rows.T @ rows


@torch.no_grad()
def watch(model: Any, parts: StreamParts, calibration: Any) -> Statistics:
    """Run the calibration and sum up statistics. Raises UserError without a batch, or for one the model rejects."""
    watched = [[_Reads(block, one) for one in branches(block)] for block in parts.blocks]
    device, seen = next(model.parameters()).device, 0
    try:
        for batch in _batches(calibration):
            seen += len(batch)
            try:
                run(model, batch.to(device))
            except Exception as error:  # a model may raise anything for inputs that are not its own
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                shape = tuple(batch.shape)
                raise UserError(f"calibration: the model does not take inputs of shape {shape}: {said}") from error
    finally:
        for handle in (handle for block in watched for one in block for handle in one.hooks):
            handle.remove()
    if not seen:
        raise UserError("calibration: got no inputs, expected a few thousand images or about ten thousand tokens")
    moments = [torch.stack([one.moment() for one in block]).sum(0) for block in watched]
    if not all(moment.isfinite().all() for moment in moments):
        raise UserError(
            "calibration: the model's outputs are not finite, expected a trained model and inputs as in training"
        )
    return Statistics(moments, [[one.sums["inner"] for one in block] for block in watched])


def _batches(calibration: Any) -> Iterator[Tensor]:
    """Inputs in batches of at most _BATCH: from one tensor, several, or what a DataLoader yields, labels and all."""
    if not isinstance(calibration, Iterable) or isinstance(calibration, (str, Mapping)):
        raise UserError(
            f"calibration: got {type(calibration).__name__}, expected a tensor of inputs, or batches of them"
        )
    for batch in [calibration] if isinstance(calibration, Tensor) else calibration:
        inputs = batch
        if isinstance(batch, Mapping):
            inputs = batch.get("input_ids", batch.get("pixel_values"))
        elif isinstance(batch, Sequence) and batch:
            inputs = batch[0]  # (images, labels)
        if not isinstance(inputs, Tensor) or inputs.ndim not in (2, 4):
            got = f"{tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise UserError(f"calibration: got {got}, expected images (B, C, H, W) or token ids (B, N)")
        yield from inputs.split(_BATCH)


def run(model: Any, inputs: Tensor) -> Tensor:
    """Images (B, C, H, W) -> logits (B, classes), or token ids (B, N) -> logits (B, N, tokens)."""
    found = model(input_ids=inputs, use_cache=False) if inputs.ndim == 2 else model(inputs)
    return getattr(found, "logits", found)


def greedy_rotation(moments: Sequence[Tensor], widths: Sequence[int], depths: Sequence[int]) -> Tensor:
    """An orthogonal (C, C): for each step, the leading directions of its blocks in the complement of those before.

    A step without blocks asks for none, and the next step takes its share.
    """
    width = widths[-1]
    found, first = torch.zeros(width, 0, dtype=torch.float64), 0
    for c, depth in zip(widths, depths):
        if not depth:
            continue
        moment = sum(moments[first : first + depth], torch.zeros(width, width, dtype=torch.float64))
        first += depth
        outside = torch.eye(width, dtype=torch.float64) - found @ found.T
        _, vectors = torch.linalg.eigh(outside @ moment @ outside)  # ascending
        new = vectors[:, width - (c - found.shape[1]) :].flip(1)
        found = torch.linalg.qr(torch.cat((found, outside @ new), 1))[0]
    return found
