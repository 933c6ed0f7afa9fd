"""The macro design of "Step by Step Network": Eq. (5) and its reverse, Eq. (6), in pure torch.

A StepsNet is a residual network in which each block reads and writes only the first C_i channels
of the residual stream. The first network F_1 is narrow and works on the first slice of the
channels; each later network F_i also takes in the next slice and is wider:

    y_1 = F_1(x_1),    y_i = F_i([y_{i-1}, x_i]),    i = 2 … n

Both containers here replace the ``nn.Sequential`` of blocks that a residual model already has.
Like it, they have a length (in blocks), can be sliced, and can be iterated: what they yield are
the blocks as functions of the *whole* residual stream, whose composition is the container.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ReverseStepsNet", "StepsNet", "StreamBlock"]


@torch.fx.wrap  # a leaf in symbolic traces, where a shape cannot be compared
def _check_width(what: str, step: int, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{what} {step} of the StepsNet: got {got} channels, expected {expected}")


class StreamBlock:
    """A block as a function of the whole residual stream: it rewrites the first ``width`` channels.

    The other channels are copied, so a loop over these costs a full-width copy a block. Attributes
    of the block can be read through it; assign on ``.block``.
    """

    __slots__ = ("block", "checkpointed", "dim", "output_order", "stream_width", "width")

    def __init__(self, block, width: int, stream_width: int, dim: int, checkpointed: bool = False):
        self.block, self.width, self.stream_width, self.dim = block, width, stream_width, dim
        self.checkpointed = checkpointed
        self.output_order: list[int] = []  # slices to put back to front at the end, Eq. (6)

    def __call__(self, z: Tensor, **kwargs) -> Tensor:
        """z: (…, C), channels along ``dim`` -> the stream after this block, (…, C)."""
        untouched = self.stream_width - self.width
        head, tail = torch.split(z, [self.width, untouched], self.dim)  # (…, C_i), (…, C - C_i)
        if self.checkpointed:
            head = checkpoint(self.block, head, use_reentrant=False, **kwargs)
        else:
            head = self.block(head, **kwargs)
        z = torch.cat((head, tail), self.dim) if untouched else head  # (…, C)
        if self.output_order:
            z = torch.cat(torch.split(z, self.output_order, self.dim)[::-1], self.dim)
        return z

    def __getattr__(self, name: str):
        if name in self.__slots__ or name.startswith("__"):  # a copy asks before there is a block
            raise AttributeError(name)
        return getattr(self.block, name)


class _Steps(nn.Module):
    """What both designs share: the checks, and the view as one sequence of blocks."""

    def __init__(self, networks: Iterable[nn.Module], widths: Sequence[int], dim: int = -1):
        super().__init__()
        networks, widths = list(networks), tuple(widths)
        if not networks or len(networks) != len(widths):
            raise ValueError(
                f"one network a width is expected: got {len(networks)} networks and {len(widths)} widths {widths}"
            )
        for step, (network, width) in enumerate(zip(networks, widths), 1):
            if not isinstance(network, nn.Module):
                raise TypeError(f"network {step}: got {type(network).__name__}, expected an nn.Module")
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(f"width of step {step}: got {width!r}, expected a positive whole number")
        self.networks = nn.ModuleList(networks)
        self.widths = widths
        self.width = max(widths)  # C, of the whole residual stream
        self.dim = dim
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, keeping only its C_i-wide input."""
        self.grad_checkpointing = enable
        for network in self.networks:
            if isinstance(network, _Steps):
                network.set_grad_checkpointing(enable)

    def _checkpointed(self, network: nn.Module, y: Tensor) -> Tensor:
        if isinstance(network, _Steps):
            return network(y)  # it checkpoints its own blocks, at their own widths
        for block in _blocks(network):
            y = checkpoint(block, y, use_reentrant=False)
        return y

    def __len__(self) -> int:
        """The number of blocks, over all steps."""
        return sum(len(_blocks(network)) for network in self.networks)

    def __iter__(self) -> Iterator[StreamBlock]:
        """The blocks in the order of execution, as functions of the whole residual stream."""
        for network, width in zip(self.networks, self.widths):
            for block in _blocks(network):
                nested = isinstance(block, StreamBlock)
                yield StreamBlock(block, width, self.width, self.dim, self.grad_checkpointing and not nested)

    def __getitem__(self, index: int | slice) -> StreamBlock | _Steps:
        """A block as a function of the stream, or a container with some of the blocks (shared, not copied)."""
        if isinstance(index, slice):
            kept = set(range(len(self))[index])
            return self._select([i in kept for i in range(len(self))])
        return list(self)[index]

    def _select(self, keep: Sequence[bool]) -> _Steps:
        networks: list[nn.Module] = []
        rest = list(keep)
        for network in self.networks:
            mine, rest = rest[: len(_blocks(network))], rest[len(_blocks(network)) :]
            if isinstance(network, _Steps):
                networks.append(network._select(mine))
            elif isinstance(network, nn.Sequential):
                named = zip(network.named_children(), mine)
                networks.append(nn.Sequential(OrderedDict(child for child, kept in named if kept)))
            else:
                networks.append(network if mine[0] else nn.Sequential())
        selected = type(self)(networks, self.widths, self.dim)
        selected.grad_checkpointing = self.grad_checkpointing
        return selected.train(self.training)

    def extra_repr(self) -> str:
        return f"widths={self.widths}, dim={self.dim}"


def _blocks(network: nn.Module) -> list:
    """A Sequential's or a StepsNet's blocks; any other module is one block."""
    return list(network) if isinstance(network, (nn.Sequential, _Steps)) else [network]


class StepsNet(_Steps):
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


class ReverseStepsNet(_Steps):
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

    def _select(self, keep: Sequence[bool]) -> _Steps:
        selected = super()._select(keep)
        selected.in_output_order = self.in_output_order and (not keep or keep[-1])
        return selected

    def __iter__(self) -> Iterator[StreamBlock]:
        blocks = list(super().__iter__())
        if blocks and len(self.widths) > 1 and self.in_output_order:
            # front to back the stream holds y_n, y_{n-1}, …, y_1
            blocks[-1].output_order = [self.widths[-1], *(aside for _, aside in reversed(self.split_widths))]
        return iter(blocks)
