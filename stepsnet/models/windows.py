"""Swin's window attention in inference: one permutation in place of shift and partition, one fused attention.

timm's block rolls the image, cuts it into windows, attends with a bias and a mask that are gathered and added in
every pass, puts the windows together and rolls back. Here the positions of roll and windows are one index, made once
a shape, and so is the sum of bias and mask; the attention is torch's ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformerBlock, window_partition
from torch import Tensor, nn

__all__ = ["PermutedWindows", "permute_windows", "restore_windows"]


def permute_windows(model: nn.Module) -> None:
    """Let the Swin blocks of a model attend through :class:`PermutedWindows`."""
    for module in model.modules():
        if isinstance(made := module.__dict__.get("_attn"), PermutedWindows):
            made.biases.clear()  # a write through .data leaves no trace in their keys
        elif isinstance(module, SwinTransformerBlock) and made is None:
            module._attn = PermutedWindows(module)
            module.attn.fused_attn = True  # timm's own, where an image has to be padded


def restore_windows(model: nn.Module) -> None:
    """Let them attend as in timm again, which exporters can trace."""
    for module in model.modules():
        if isinstance(module.__dict__.get("_attn"), PermutedWindows):
            del module._attn


class PermutedWindows:
    """``SwinTransformerBlock._attn`` of one block, without gradients: (B, H, W, C) -> (B, H, W, C).

    It leaves to timm's own what it does not cover: gradients, training, and an image that windows do not divide.
    """

    def __init__(self, block: Any):
        self.block = block
        self.orders: dict[Any, tuple[Tensor, Tensor]] = {}  # what is last of a shape, a device and a type
        self.biases: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        block, attention = self.block, self.block.attn
        _, height, width, _ = x.shape
        rows, columns = block.window_size
        divided = height % rows == 0 and width % columns == 0
        if torch.is_grad_enabled() or block.training or not divided:
            return type(block)._attn(block, x)
        batch, area = len(x), rows * columns
        order, back = self._order(x)
        windows = x.flatten(1, 2).index_select(1, order)  # (B, H·W, C), a window after the other
        qkv = attention.qkv(windows).reshape(batch * height * width // area, area, 3, attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B·windows, heads, area, head size)
        bias = self._bias(x)  # (1 or windows, heads, area, area)
        if len(bias) > 1:
            bias = bias.expand(batch, -1, -1, -1, -1).flatten(0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=attention.scale)
        y = attention.proj(y.transpose(1, 2).reshape(batch, height * width, -1))
        return y.index_select(1, back).view(batch, height, width, -1)

    def _order(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the image in the order of the shifted windows, and the way back."""
        key = (*x.shape[1:3], x.device, self.block.window_size, self.block.shift_size)
        if key not in self.orders:
            height, width = x.shape[1:3]
            positions = torch.arange(height * width, device=x.device).view(1, height, width, 1)
            shifted = torch.roll(positions, [-size for size in self.block.shift_size], (1, 2))
            order = window_partition(shifted, self.block.window_size).flatten()
            self.orders.clear()
            self.orders[key] = order, torch.argsort(order)
        return self.orders[key]

    def _bias(self, x: Tensor) -> Tensor:
        """Relative position bias and mask, (1 or windows, heads, area, area); anew where weights changed."""
        table = self.block.attn.relative_position_bias_table
        if torch.compiler.is_compiling():  # a frozen graph holds the result
            return self._made_bias(x)
        version = 0 if table.is_inference() else table._version
        key = (*x.shape[1:3], table.device, table.dtype, table.data_ptr(), version, self.block.shift_size)
        if key not in self.biases:
            self.biases.clear()
            self.biases[key] = self._made_bias(x)
        return self.biases[key]

    def _made_bias(self, x: Tensor) -> Tensor:
        bias = self.block.attn._get_rel_pos_bias()  # (1, heads, area, area)
        dynamic = getattr(self.block, "dynamic_mask", False)
        mask = self.block.get_attn_mask(x) if dynamic else self.block.attn_mask  # (windows, area, area)
        return bias if mask is None else bias + mask.unsqueeze(1)
