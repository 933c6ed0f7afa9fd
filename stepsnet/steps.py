"""The macro design of "Step by Step Network": Eq. (5) and its reverse, Eq. (6), in pure torch.

A StepsNet is a residual network in which each block reads and writes only the first C_i channels
of the residual stream. The first network F_1 is narrow and works on the first slice of the
channels; each later network F_i also takes in the next slice and is wider:

    y_1 = F_1(x_1),    y_i = F_i([y_{i-1}, x_i]),    i = 2 … n

Both designs here replace the ``nn.Sequential`` of blocks that a residual model already has; stream.py
holds what they share with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.fx
from torch import Tensor, nn

from .stream import StepSequence, StreamBlock

__all__ = ["ReverseStepsNet", "StepsNet"]


@torch.fx.wrap  # a leaf in symbolic traces, where a shape cannot be compared
def _check_width(what: str, step: int, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{what} {step} of the StepsNet: got {got} channels, expected {expected}")


class StepsNet(StepSequence):
    """The n-step network of Eq. (5): y_1 = F_1(x_1), y_i = F_i([y_{i-1}, x_i]).

    Args:
        networks: F_1 … F_n, modules that keep their width (usually an ``nn.Sequential`` of blocks;
            an empty one passes its channels through; a nested StepsNet is Fig. 4(c)).
        widths: C_1 … C_n, strictly increasing; C_n is the width of the input and of the output.
        dim: the channel dimension: -1 for (B, N, C) and (B, H, W, C), 1 for (B, C, H, W).

    Shape: (…, C_n, …) -> (…, C_n, …), one split and n - 1 concatenations.

    Raises:
        ValueError: widths that do not increase or do not match the networks; at run time, an input
            of another width, or a network that changes its width. Each names the step.
    """

    def __init__(self, networks: Iterable[nn.Module], widths: Sequence[int], dim: int = -1):
        super().__init__(networks, widths, dim)
        for step, (narrow, wide) in enumerate(zip(self.widths, self.widths[1:]), 2):
            if wide <= narrow:
                raise ValueError(
                    f"width of step {step}: got {wide}, expected more than the {narrow} of step {step - 1} "
                    f"(widths {self.widths}: each step must take in some new channels)"
                )
        # d_1 … d_n, the widths of the slices x_1 … x_n
        self.slice_widths = [wide - narrow for narrow, wide in zip((0, *self.widths), self.widths)]

    def forward(self, x: Tensor) -> Tensor:
        _check_width("input to step", len(self.networks), x.shape[self.dim], self.width)
        slices = torch.split(x, self.slice_widths, self.dim) if len(self.networks) > 1 else [x]  # x_i: (…, d_i)
        y = slices[0]
        for i, network in enumerate(self.networks):
            if i > 0:
                y = torch.cat((y, slices[i]), self.dim)  # [y_{i-1}, x_i]: (…, C_i)
            if self.grad_checkpointing and not torch.jit.is_scripting():
                y = self._checkpointed(network, y)
            else:
                y = network(y)
            _check_width("output of step", i + 1, y.shape[self.dim], self.widths[i])
        return y


class ReverseStepsNet(StepSequence):
    """The wide-to-narrow design of Eq. (6), the ablation of Table 10.

    x_{i+1}, y_i = Split(F_i(x_i)), y_n = F_n(x_n), and the output is [y_1, …, y_n]: F_1 is the widest
    network, and each step sets aside the channels behind the next step's width.

    Args:
        networks: F_1 … F_n, modules that keep their width.
        widths: C_1 … C_n, strictly decreasing; C_1 is the width of the input and of the output.
        dim: the channel dimension.

    Iterated, its blocks leave the stream in the input's channel order, [x_{i+1}, y_i, …, y_1]; the last
    one puts it into the output's.

    Raises:
        ValueError: as for :class:`StepsNet`.
    """

    def __init__(self, networks: Iterable[nn.Module], widths: Sequence[int], dim: int = -1):
        super().__init__(networks, widths, dim)
        for step, (wide, narrow) in enumerate(zip(self.widths, self.widths[1:]), 2):
            if narrow >= wide:
                raise ValueError(
                    f"width of step {step}: got {narrow}, expected less than the {wide} of step {step - 1} "
                    f"(widths {self.widths}: each step must set some channels aside)"
                )
        # of step i < n: the next step's width, and that of y_i
        self.split_widths = [[narrow, wide - narrow] for wide, narrow in zip(self.widths, self.widths[1:])]
        self.in_output_order = True  # False in a slice without the last block

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.networks) - 1
        _check_width("input to step", 1, x.shape[self.dim], self.width)
        outputs: list[Tensor] = []
        for i, network in enumerate(self.networks):
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = self._checkpointed(network, x)
            else:
                x = network(x)
            _check_width("output of step", i + 1, x.shape[self.dim], self.widths[i])
            if i < last:
                x, y = torch.split(x, self.split_widths[i], self.dim)  # x_{i+1}: (…, C_{i+1}), y_i: (…, d_i)
                outputs.append(y)
        outputs.append(x)
        if not self.in_output_order:
            outputs = outputs[::-1]
        return torch.cat(outputs, self.dim) if last > 0 else x  # [y_1, …, y_n]: (…, C)

    def _select(self, keep: Sequence[bool]) -> StepSequence:
        selected = super()._select(keep)
        assert isinstance(selected, ReverseStepsNet)
        selected.in_output_order = self.in_output_order and (not keep or keep[-1])
        return selected

    def __iter__(self) -> Iterator[StreamBlock]:
        blocks = list(super().__iter__())
        if blocks and len(self.widths) > 1 and self.in_output_order:
            # front to back the stream holds y_n, y_{n-1}, …, y_1
            blocks[-1].output_order = [self.widths[-1], *(aside for _, aside in reversed(self.split_widths))]
        return iter(blocks)
