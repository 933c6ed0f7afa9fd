"""The macro design of "Step by Step Network" for every profile of widths, in pure torch.

A StepsNet is a residual network in which each network F_i reads and writes only the first C_i channels of the
residual stream, and the other channels wait. Widths from narrow to wide give Eq. (5), the paper's design:

    y_1 = F_1(x_1),    y_i = F_i([y_{i-1}, x_i]),    i = 2 … n

Widths from wide to narrow give Eq. (6), the ablation of Table 10, and wide-narrow-wide is the bow-tie of
"Variable-Width Transformers" (arXiv 2606.18246). The container replaces the ``nn.Sequential`` of blocks that a
residual model already has; models/blocks.py finds it, and the blocks inside it, in a model.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from .plan import check_widths
from .stream import StreamBlock, change_width, check_stream, cut_stream, module_of, recomputed

__all__ = ["ReverseStepsNet", "StepsNet", "is_plain_sequence"]

torch.fx.wrap("check_stream")  # a leaf in symbolic traces, which look for it in the module that calls it


class StepsNet(nn.Module):
    """Networks of several widths in one residual stream: F_i reads and writes its first C_i channels.

    Args:
        networks: F_1 … F_n, modules that keep their width (usually an ``nn.Sequential`` of blocks; an empty one
            passes its channels through; a nested StepsNet is Fig. 4(c)). A module with a forward pass of its own, also
            a subclass of ``nn.Sequential`` with one, is one block.
        widths: C_1 … C_n, any positive integers; the largest, C, is the width of the input and of the output.
        dim: the channel dimension: -1 for (B, N, C) and (B, H, W, C), 1 for (B, C, H, W).

    Shape: (…, C, …) -> (…, C, …). Increasing widths cost one split and n - 1 concatenations. In general there is a
    split in front of each narrower network, a concatenation in front of each wider one, and one at the end where
    channels still wait; the number of blocks does not matter.

    Like an ``nn.Sequential`` of blocks, a StepsNet has a length in blocks, can be sliced, and can be iterated: it
    yields the blocks as functions of the whole stream (:class:`StreamBlock`), whose composition is the container, but
    for hooks on the networks: where blocks run one by one, as with gradient checkpointing, only their own are called.
    ``blocks[i] = Wrapper(blocks[i])`` puts a module in a block's place.

    Raises:
        ValueError: widths that are not positive integers, or not one network per width; in the forward pass, an
            input of another width, or a network that changes its width.
        TypeError: a network that is not an ``nn.Module``, or one without a forward pass; in the forward pass, a
            network that returns no tensor, such as a tuple.
    """

    _stream_hooks: Any = ()  # functions, see stream_hook
    lead = 0  # blocks in front of the stream, which only a StepSequence may have
    stream_scale = 1.0  # factor of the stream where it begins; only a StepSequence may have another

    def __init__(self, networks: Iterable[nn.Module], widths: Sequence[int], dim: int = -1):
        super().__init__()
        networks, widths = list(networks), tuple(widths)
        check_widths(widths)
        if not isinstance(dim, int):
            raise ValueError(f"dim: got {dim!r}, expected the index of the channel dimension")
        if len(networks) != len(widths):
            raise ValueError(f"networks: got {len(networks)}, expected one per width of {widths}")
        for step, network in enumerate(networks, 1):
            if not isinstance(network, nn.Module) or getattr(network.forward, "__func__", None) is nn.Module.forward:
                kind = type(network).__name__
                raise TypeError(
                    f"network {step}: got {kind}, expected an nn.Module that can be called, such as nn.Sequential"
                )
        self.networks = nn.ModuleList(networks)
        self.widths = widths
        self.width = max(widths)  # C
        self.slice_widths, self.slices_read = cut_stream(widths)
        self.dim = dim
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        y = check_stream(x, self.dim, self.width, 0)  # (…, C)
        waiting: list[Tensor] = []
        for i, network in enumerate(self.networks):
            y, waiting = change_width(y, waiting, self.slices_read[i], self.slice_widths, self.dim)  # y: (…, C_i)
            if self.grad_checkpointing and not torch.jit.is_scripting():
                y = self._checkpointed(network, y)
            else:
                y = network(y)
            y = check_stream(y, self.dim, self.widths[i], i + 1)
        y, waiting = change_width(y, waiting, len(self.slice_widths), self.slice_widths, self.dim)  # y: (…, C)
        return y

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, keeping only its input of C_i channels."""
        self.grad_checkpointing = enable
        for network in self.networks:
            if isinstance(network, StepsNet):
                network.set_grad_checkpointing(enable)

    def _checkpointed(self, network: nn.Module, y: Tensor) -> Tensor:
        if isinstance(network, StepsNet):
            return network(y)  # it checkpoints its own blocks, at their own widths
        for block in _blocks_in(network):
            y = recomputed(block, y)
        return y

    def __len__(self) -> int:
        """The number of blocks, over all steps."""
        return sum(self.blocks_per_step())

    def blocks_per_step(self) -> list[int]:
        """The number of blocks of each step."""
        return [len(_blocks_in(network)) for network in self.networks]

    def __iter__(self) -> Iterator[StreamBlock]:
        """The blocks in the order of execution, as functions of the whole residual stream."""
        begin: Callable[[Tensor], Tensor] | None = self._begin_stream
        for network, width in zip(self.networks, self.widths):
            for block in _blocks_in(network):
                checkpointed = self.grad_checkpointing and not isinstance(block, StreamBlock)
                yield StreamBlock(module_of(block), width, self.width, self.dim, checkpointed, begin, run=block)
                begin = None

    def __getitem__(self, index: int | slice) -> StreamBlock | StepsNet:
        """A block as a function of the stream, or a container with some of the blocks (shared, not copied).

        A slice with all of the blocks is this container itself.
        """
        if isinstance(index, slice):
            if index.step is not None and index.step < 0:
                raise ValueError(f"slice: got a step of {index.step}, expected a positive one: blocks keep their order")
            kept = range(len(self))[index]
            if kept == range(len(self)):
                return self  # transformers' models take such a slice in each forward pass
            return self._select([i in kept for i in range(len(self))])
        return list(self)[index]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        """Put a module that reads and writes the block's own channels, (…, C_i) -> (…, C_i), in the block's place.

        The module may hold blocks that were found by their index: each is replaced there by the block's own module,
        so that its parameters are among those of the new module.

        Raises:
            TypeError: something that is not an ``nn.Module``, or a design of the stream joins the container's blocks.
        """
        holder, name = self._places()[operator.index(index)]
        module = module_of(module)
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise TypeError(f"block {index}: got {kind}, expected an nn.Module, such as blocks[i].block")
        if isinstance(holder, nn.ModuleList) and (isinstance(module, StepsNet) or is_plain_sequence(module)):
            module = nn.Sequential(module)  # one block, as before, and not as many as it holds
        for part in module.modules():
            for attribute, value in list(vars(part).items()):
                if isinstance(value, StreamBlock):
                    setattr(part, attribute, module_of(value))
        setattr(holder, name, module)

    def _places(self) -> list[tuple[nn.Module, str]]:
        """For each block, the module that holds it and its name there."""
        places: list[tuple[nn.Module, str]] = []
        for step, network in enumerate(self.networks):
            if isinstance(network, StepsNet):
                places += network._places()
            elif is_plain_sequence(network):
                places += [(network, name) for name in network._modules]
            else:
                places.append((self.networks, str(step)))
        return places

    @contextmanager
    def stream_hook(self, hook: Callable[[StepsNet, Tensor], Tensor]) -> Iterator[None]:
        """Replace the input x, (…, C), by ``hook(self, x)``, whether the container is called or looped over."""

        def replaced(module: StepsNet, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if inputs:
                return (hook(module, inputs[0]), *inputs[1:]), named
            return inputs, {**named, "x": hook(module, named["x"])}

        handle = self.register_forward_pre_hook(replaced, with_kwargs=True)
        self._stream_hooks = (*self._stream_hooks, hook)
        try:
            yield
        finally:
            handle.remove()
            self._stream_hooks = tuple(other for other in self._stream_hooks if other is not hook)

    def _begin_stream(self, x: Tensor) -> Tensor:
        """What the first block of a loop does to the whole stream before it runs."""
        for hook in self._stream_hooks:
            x = hook(self, x)
        return x

    def _select(self, keep: Sequence[bool]) -> StepsNet:
        """The same steps with only the blocks for which ``keep`` (one entry per block) is true."""
        networks: list[nn.Module] = []
        start = 0
        for network, depth in zip(self.networks, self.blocks_per_step()):
            keep_here = keep[start : start + depth]
            start += depth
            if isinstance(network, StepsNet):
                networks.append(network._select(keep_here))
            elif is_plain_sequence(network):
                named = zip(network._modules.items(), keep_here)  # named_children leaves out a block that repeats
                part = nn.Sequential(
                    OrderedDict((name, block) for (name, block), kept in named if kept and block is not None)
                )
                part.training = network.training
                networks.append(part)
            else:
                networks.append(network if keep_here[0] else nn.Sequential())
        selected = type(self)(networks, self.widths, self.dim)
        selected.grad_checkpointing = self.grad_checkpointing
        selected.training = selected.networks.training = self.training  # not that of the blocks, which are shared
        selected._stream_hooks = self._stream_hooks if any(keep[:1]) else ()
        return selected

    def extra_repr(self) -> str:
        return f"widths={self.widths}, dim={self.dim}"


class ReverseStepsNet(StepsNet):
    """The wide-to-narrow design of Eq. (6): a :class:`StepsNet` whose widths decrease.

    x_{i+1}, y_i = Split(F_i(x_i)) and y_n = F_n(x_n). The output is [y_n, …, y_1], in the channel order of the input.
    Eq. (6) writes it as [y_1, …, y_n]: the same network up to the order in which the next layer stores its weights,
    with the parameters and the compute of Table 10.

    Raises:
        ValueError: widths that do not decrease strictly, and as for StepsNet.
    """

    def __init__(self, networks: Iterable[nn.Module], widths: Sequence[int], dim: int = -1):
        super().__init__(networks, widths, dim)
        if any(narrow >= wide for wide, narrow in zip(self.widths, self.widths[1:])):
            raise ValueError(f"widths: got {self.widths}, expected strictly decreasing widths")


def _blocks_in(network: nn.Module) -> list:
    """The blocks of an nn.Sequential or of a StepsNet; any other module is one block."""
    blocks: Any = network
    return list(blocks) if isinstance(network, StepsNet) or is_plain_sequence(network) else [network]


def is_plain_sequence(network: nn.Module) -> bool:
    """Whether it does nothing but run one block after another."""
    return isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward
