"""Where a block with convolutions has its channels, which designs expect last: found by running it without data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..macs import OF_MODULES, on_meta

__all__ = ["check_channels"]

_STREAMS = {nn.Conv1d: "sequences (B, C, N)", nn.Conv2d: "images (B, C, H, W)", nn.Conv3d: "volumes (B, C, D, H, W)"}


def check_channels(block: nn.Module, width: int | None) -> None:
    """Raises UserError for a block with convolutions whose channels are in dimension 1.

    One that runs on no stream alone, as where it takes a mask, is refused if it has convolutions over images.

    Args:
        width: C; by default the sizes of the block's vectors are tried.
    """
    kinds = [kind for kind in _STREAMS if any(isinstance(module, kind) for module in block.modules())]
    if not kinds:
        return
    traced = on_meta(block)
    sizes = {size for parameter in block.parameters() for size in parameter.shape}
    other = next(n * n for n in range(4, len(sizes) + 5) if n * n not in sizes)  # an image of n by n, as tokens too
    widths = [width] if width else dict.fromkeys(one.shape[0] for one in block.parameters() if one.ndim == 1)
    shapes = [(channels, (other,) * dims) for channels in widths for dims in (1, 2, 3)]
    if any(_keeps(traced, (1, *others, channels)) for channels, others in shapes):
        return
    if nn.Conv2d in kinds or any(_keeps(traced, (1, channels, *others)) for channels, others in shapes):
        of = _STREAMS[nn.Conv2d if nn.Conv2d in kinds else kinds[0]]
        raise UserError(
            f"residual: {type(block).__name__} has convolutions over {of}, expected blocks of channels last"
        )


@torch.no_grad()
def _keeps(block: nn.Module, shape: Sequence[int]) -> bool:
    """Whether a block on the meta device takes a stream of that shape and returns one."""
    dtype = next((one.dtype for one in block.parameters() if one.is_floating_point()), None)
    try:
        y = block(torch.empty(shape, device="meta", dtype=dtype))
    except OF_MODULES:
        return False
    return isinstance(y, Tensor) and y.shape == tuple(shape)
