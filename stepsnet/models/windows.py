"""Swin's window attention in two other ways: for maps that windows do not divide, and faster for inference.

timm's block rolls the map, cuts it into windows, attends with a bias and a mask that are gathered and added in
every pass, puts the windows back together and rolls back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformerBlock, window_partition, window_reverse
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["PaddedWindows", "PermutedWindows", "pad_windows", "permute_windows", "restore_windows"]

_ATTENDS = {  # the method of a block that attends in windows
    SwinTransformerBlock: "_attn",
    SwinTransformerV2Block: "_attn",
    SwinTransformerV2CrBlock: "_shifted_window_attn",
}


def pad_windows(model: nn.Module) -> None:
    """Let a model's Swin blocks, of all kinds, attend through :class:`PaddedWindows`."""
    for module in model.modules():
        for kind, method in _ATTENDS.items():
            if isinstance(module, kind) and method not in module.__dict__:
                setattr(module, method, PaddedWindows(module, method))


class PaddedWindows:
    """The window attention of one block on a map of any size, (B, H, W, C) -> (B, H, W, C).

    The map is first padded with zeros and then shifted, as in the detectors of Swin's authors, so that the mask keeps
    opposite edges apart. timm (1.0.31) shifts first: the rows that wrap around then lie before the padding, where its
    mask expects their neighbours. If windows divide the map, this is timm's attention.
    """

    def __init__(self, block: Any, method: str):
        self.block, self.method = block, method

    def __call__(self, x: Tensor) -> Tensor:
        attend = getattr(type(self.block), self.method)
        height, width = x.shape[1:3]
        rows, columns = self.block.window_size
        if statically_known_true(height % rows == 0) and statically_known_true(width % columns == 0):
            return attend(self.block, x)
        below, right = (rows - height % rows) % rows, (columns - width % columns) % columns
        padded = F.pad(x, (0, 0, 0, right, 0, below))
        if isinstance(self.block, SwinTransformerBlock):
            attended = _attend_in_windows(self.block, padded)
        else:
            attended = attend(self.block, padded)
        return attended[:, :height, :width].contiguous()


def _attend_in_windows(block: Any, x: Tensor) -> Tensor:
    """timm's ``_attn`` on a map that windows divide, without its size arithmetic, which is slow to trace twice."""
    _, height, width, channels = x.shape
    back = tuple(block.shift_size)
    there = tuple(-size for size in back)
    if any(back):
        x = torch.roll(x, there, (1, 2))
    windows = window_partition(x, block.window_size).view(-1, block.window_area, channels)
    mask = block.get_attn_mask(x) if getattr(block, "dynamic_mask", False) else block.attn_mask
    windows = block.attn(windows, mask=mask).view(-1, *block.window_size, channels)
    x = window_reverse(windows, block.window_size, height, width)
    return torch.roll(x, back, (1, 2)) if any(back) else x


def permute_windows(model: nn.Module, multiple: int = 1) -> None:
    """Let Swin blocks attend through :class:`PermutedWindows` if their heads' width is a multiple of ``multiple``."""
    for module in model.modules():
        made = module.__dict__.get("_attn")
        if isinstance(made, PermutedWindows):
            made.bias = None  # a write through .data leaves no trace in its key
        elif (
            isinstance(module, SwinTransformerBlock)
            and isinstance(made, PaddedWindows | None)
            and module.attn.qkv.out_features // (3 * module.attn.num_heads) % multiple == 0
        ):
            module._attn = PermutedWindows(module)
            module.attn.fused_attn = True  # for the block's own attention, if a map has to be padded


def restore_windows(model: nn.Module) -> None:
    """Undo :func:`permute_windows`, since exporters can trace the attention that the blocks were built with."""
    module: Any
    for module in model.modules():
        if isinstance(made := module.__dict__.get("_attn"), PermutedWindows):
            module.attn.fused_attn = made.was_fused
            del module._attn
            if made.padded is not None:
                module._attn = made.padded


class PermutedWindows:
    """``SwinTransformerBlock._attn`` of one block, without gradients: (B, H, W, C) -> (B, H, W, C).

    Rolling and cutting into windows are one index, made once per shape, as is the sum of bias and mask; the attention
    is torch's ``scaled_dot_product_attention``. What this does not cover is left to the block as it was built:
    gradients, training, a map that windows do not divide, and an attention with hooks inside.
    """

    def __init__(self, block: Any):
        self.block, self.was_fused = block, block.attn.fused_attn
        self.padded: PaddedWindows | None = block.__dict__.get("_attn")
        self.orders: dict[Any, tuple[Tensor, Tensor]] = {}  # the last one, by shape and device
        self.bias: tuple[Any, Tensor, Tensor] | None = None  # (key, table, bias) of the last one

    def __call__(self, x: Tensor) -> Tensor:
        block, attention = self.block, self.block.attn
        _, height, width, _ = x.shape
        rows, columns = block.window_size
        divided = height % rows == 0 and width % columns == 0
        if not torch.compiler.is_compiling() and any(
            part._forward_hooks or part._forward_pre_hooks for part in attention.modules()
        ):
            return self._as_built(x)
        if torch.is_grad_enabled() or block.training or not divided:
            return self._attend(x)
        batch, area = x.shape[0], rows * columns
        order, back = self._order(x)
        windows = x.flatten(1, 2).index_select(1, order)  # (B, H·W, C), window after window
        qkv = attention.qkv(windows).reshape(batch * height * width // area, area, 3, attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B·windows, heads, area, head size)
        bias = self._bias(x).to(q.dtype)  # (1 or windows, heads, area, area)
        if len(bias) > 1:
            bias = bias.expand(batch, -1, -1, -1, -1).flatten(0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=attention.scale)
        y = attention.proj(y.transpose(1, 2).reshape(batch, height * width, -1))
        return y.index_select(1, back).view(batch, height, width, -1)

    @property
    def _attend(self) -> Callable[[Tensor], Tensor]:
        """The attention of the block as it was built."""
        return self.padded or type(self.block)._attn.__get__(self.block)

    def _as_built(self, x: Tensor) -> Tensor:
        """Attend through the modules whose outputs hooks may want, such as the softmax."""
        attention = self.block.attn
        attention.fused_attn = self.was_fused
        try:
            return self._attend(x)
        finally:
            attention.fused_attn = True

    def _order(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the image in the order of the shifted windows, and the inverse of this order."""
        key = (*x.shape[1:3], x.device, self.block.window_size, self.block.shift_size)
        orders = self.orders  # which another thread's call may replace meanwhile
        if key not in orders:
            height, width = x.shape[1:3]
            positions = torch.arange(height * width, device=x.device).view(1, height, width, 1)
            shifted = torch.roll(positions, [-size for size in self.block.shift_size], (1, 2))
            order = window_partition(shifted, self.block.window_size).flatten()
            found = order, torch.argsort(order)
            if torch.compiler.is_exporting():  # of tensors without data, which are of no use to the next call
                return found
            self.orders = orders = {key: found}
        return orders[key]

    def _bias(self, x: Tensor) -> Tensor:
        """Relative position bias and mask, (1 or windows, heads, area, area), made anew if weights have changed."""
        table = self.block.attn.relative_position_bias_table
        if torch.compiler.is_compiling():  # a frozen graph holds the result
            return self._made_bias(x)
        version = 0 if table.is_inference() else table._version
        key = (*x.shape[1:3], table.device, table.dtype, table.data_ptr(), version, self.block.shift_size)
        bias = self.bias  # which another thread's call may replace meanwhile
        if bias is None or bias[0] != key or bias[1] is not table:  # a freed table's memory is used again
            self.bias = bias = key, table, self._made_bias(x)
        return bias[2]

    def _made_bias(self, x: Tensor) -> Tensor:
        bias = self.block.attn._get_rel_pos_bias()  # (1, heads, area, area)
        dynamic = getattr(self.block, "dynamic_mask", False)
        mask = self.block.get_attn_mask(x) if dynamic else self.block.attn_mask  # (windows, area, area)
        return bias if mask is None else bias + mask.unsqueeze(1)
