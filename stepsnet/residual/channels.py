"""Where a block has its channels: in dimension 1, or last, as designs expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import UserError
from ..macs import OF_MODULES, on_meta
from .known_blocks import is_norm

__all__ = ["channel_dim", "check_channels"]

_STREAMS = {nn.Conv1d: "sequences (B, C, N)", nn.Conv2d: "images (B, C, H, W)", nn.Conv3d: "volumes (B, C, D, H, W)"}
# layers for series, images and videos, by the number of dimensions of these; their own channels are dimension 1
_OF_IMAGES: dict[int, tuple[type[nn.Module], ...]] = {
    3: (nn.Conv1d, nn.BatchNorm1d),
    4: (nn.Conv2d, nn.BatchNorm2d),
    5: (nn.Conv3d, nn.BatchNorm3d),
}
_OF_DIMENSION_1 = (_NormBase, nn.GroupNorm)


def channel_dim(block: nn.Module, shape: Sequence[int]) -> int:
    """The dimension of the channels in the stream of a block, 1 or -1.

    In blocks without convolutions or batch norms it is the last. Otherwise, the first norm decides whose size is that
    of only one of the two dimensions. If there is none, the sizes of all vectors are compared. If these do not decide
    either, it is 1 in images, and also in series and videos if the block begins with a convolution or batch norm; else
    the last.

    Args:
        shape: the shape of the stream.
    """
    kinds = _OF_IMAGES.get(len(shape), ())
    of_images = [module for module in block.modules() if isinstance(module, kinds)]
    if not of_images:  # sequences may have as many tokens as some layer has biases
        return -1
    first, last = shape[1], shape[-1]
    norms: list[Any] = [module for module in block.modules() if is_norm(module)]
    for norm in norms:
        size = norm.weight.shape[0]
        if size > 1 and size == first != last:
            return 1
        # a batch norm of the last dimension's size may be over fewer channels inside the block, as in a bottleneck
        if size > 1 and size == last != first and not isinstance(norm, _OF_DIMENSION_1):
            return -1
    vectors = {parameter.shape[0] for parameter in block.parameters() if parameter.ndim == 1} - {1}
    if (first in vectors) != (last in vectors):
        return 1 if first in vectors else -1
    if len(shape) == 4:
        return 1
    with_weights = (one for one in block.modules() if next(one.parameters(recurse=False), None) is not None)
    return 1 if next(with_weights, None) in of_images else -1  # a convolution may be inside, as in a Conformer's blocks


def check_channels(block: nn.Module, width: int | None) -> None:
    """Raise UserError for a block with convolutions whose channels are in dimension 1.

    A block that cannot run on a stream alone, for example because it takes a mask, is refused if it has convolutions
    over images.

    Args:
        width: C; by default the sizes of the block's vectors are tried.
    """
    kinds = [kind for kind in _STREAMS if any(isinstance(module, kind) for module in block.modules())]
    if not kinds:
        return
    traced = on_meta(block)
    sizes = {size for parameter in block.parameters() for size in parameter.shape}
    other = next(n * n for n in range(4, len(sizes) + 5) if n * n not in sizes)  # as many tokens as an image of n by n
    widths = [width] if width else dict.fromkeys(one.shape[0] for one in block.parameters() if one.ndim == 1)
    shapes = [(channels, (other,) * dims) for channels in widths for dims in (1, 2, 3)]
    if any(_keeps(traced, (1, *others, channels)) for channels, others in shapes):
        return
    if nn.Conv2d in kinds or any(_keeps(traced, (1, channels, *others)) for channels, others in shapes):
        of = _STREAMS[nn.Conv2d if nn.Conv2d in kinds else kinds[0]]
        raise UserError(
            f"residual: {type(block).__name__} has convolutions over {of}, expected blocks with channels last"
        )


@torch.no_grad()
def _keeps(block: nn.Module, shape: Sequence[int]) -> bool:
    """Whether a block on the meta device takes a stream of that shape and returns one of the same shape."""
    dtype = next((one.dtype for one in block.parameters() if one.is_floating_point()), None)
    try:
        y = block(torch.empty(shape, device="meta", dtype=dtype))
    except OF_MODULES:
        return False
    return isinstance(y, Tensor) and y.shape == tuple(shape)
