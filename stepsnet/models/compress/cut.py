"""One block cut to fewer channels, heads and hidden units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...residual.branches import BranchParts, Projection
from ...residual.linears import heads_of, inputs_of_last
from .stream_parts import branches

__all__ = ["cut_block", "heads_and_groups"]


def heads_and_groups(block: nn.Module) -> tuple[int, int]:
    """The number of heads, and how many of them share keys and values."""
    attention = next(one for one in branches(block) if one.projections)
    queries, keys = (_rows_of(block, projection) for projection in (attention.projections or ())[:2])
    return heads_of(block, attention), len(queries) // len(keys)


@torch.no_grad()
def cut_block(block: nn.Module, whole: nn.Module, inner: list[Tensor], width: int) -> None:
    """Fill a narrower block with those weights of a whole one that contribute most to the first channels.

    Args:
        inner: second moments for each branch, as in :class:`~stepsnet.models.compress.rotation.Statistics`.
        width: C_i.

    Raises:
        UserError: the block has a parameter of another shape that belongs to no known layer.
    """
    filled: set[str] = set()
    for parts, moment in zip(branches(whole), inner):
        last: Any = whole.get_submodule(parts.last)
        to_channels = last.weight[:width].cpu().double()  # (C_i, K)
        if parts.projections:
            rows, columns = _of_heads(block, whole, parts, moment.to(to_channels), to_channels)
        else:
            scores = moment.to(to_channels) * to_channels.square().sum(0)
            columns = _highest(scores, inputs_of_last(block, parts))
            rows = _rows(whole, [(one, columns) for one in parts.hidden])
        for path, kept in rows.items():
            _copy(block.get_submodule(path), whole.get_submodule(path), kept, slice(width))
        _copy(block.get_submodule(parts.last), last, slice(width), columns)
        filled.update(rows, [parts.last, parts.norm])
    theirs = dict(whole.named_parameters())
    for name, parameter in block.named_parameters():
        if name.rpartition(".")[0] in filled:
            continue
        if name not in theirs or parameter.shape != theirs[name].shape:
            raise UserError(
                f"compress: {name} of {type(whole).__name__}: got a parameter that compress does not know how to cut"
            )
        parameter.copy_(theirs[name])  # of one head's size, such as a norm of queries


def _of_heads(
    block: nn.Module, whole: nn.Module, parts: BranchParts, moment: Tensor, to_channels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The rows that stay in each layer of an attention, by path, and the columns that stay in its last layer."""
    heads, shared = heads_and_groups(whole)
    size = inputs_of_last(whole, parts) // heads
    by_head = to_channels.unflatten(-1, (heads, size))  # (C_i, H, D)
    scores = torch.einsum("chd,hde,che->h", by_head, moment, by_head)  # of what each head adds to the channels
    kept_inputs = inputs_of_last(block, parts)
    groups = _highest(scores.unflatten(0, (-1, shared)).sum(1), kept_inputs // size // shared)
    kept = (groups[:, None] * shared + torch.arange(shared)).flatten()
    entries = [_entries(heads, size) for heads in (kept, groups, groups)]
    return _rows(whole, list(zip(parts.projections or (), entries))), entries[0]


def _rows(whole: nn.Module, kept: list[tuple[Projection, Tensor]]) -> dict[str, Tensor]:
    """The rows that stay in each layer, over all of its parts, by path."""
    rows: dict[str, list[Tensor]] = {}
    for projection, entries in sorted(kept, key=lambda one: one[0][:2]):
        rows.setdefault(projection[0], []).append(_rows_of(whole, projection).start + entries)
    return {path: torch.cat(one) for path, one in rows.items()}


def _entries(heads: Tensor, size: int) -> Tensor:
    return (heads[:, None] * size + torch.arange(size)).flatten()


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` highest scores, in ascending order."""
    return scores.cpu().topk(count).indices.sort().values


def _rows_of(block: nn.Module, projection: Projection) -> range:
    path, part, count = projection
    layer: Any = block.get_submodule(path)
    each = layer.out_features // count
    return range(part * each, (part + 1) * each)


def _copy(layer: Any, whole: Any, rows: Any, columns: Any) -> None:
    layer.weight.copy_(whole.weight[rows][:, columns])
    if whole.bias is not None:
        layer.bias.copy_(whole.bias[rows])
