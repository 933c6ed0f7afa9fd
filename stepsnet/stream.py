"""The residual stream: steps of several widths seen as one sequence of blocks.

What both designs of steps.py share. Like the ``nn.Sequential`` of blocks that a residual model has, a
:class:`StepSequence` has a length in blocks, can be sliced, and can be iterated: what it yields are the
blocks as functions of the *whole* residual stream, whose composition is the container.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["StepSequence", "StreamBlock", "blocks_of", "is_flat", "step_sequences", "widths_of"]


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


class StepSequence(nn.Module):
    """Networks of several widths as one sequence of blocks: its length, iteration, slices and checkpointing."""

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
            if isinstance(network, StepSequence):
                network.set_grad_checkpointing(enable)

    def _checkpointed(self, network: nn.Module, y: Tensor) -> Tensor:
        if isinstance(network, StepSequence):
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

    def __getitem__(self, index: int | slice) -> StreamBlock | StepSequence:
        """A block as a function of the stream, or a container with some of the blocks (shared, not copied)."""
        if isinstance(index, slice):
            kept = set(range(len(self))[index])
            return self._select([i in kept for i in range(len(self))])
        return list(self)[index]

    def _select(self, keep: Sequence[bool]) -> StepSequence:
        networks: list[nn.Module] = []
        rest = list(keep)
        for network in self.networks:
            mine, rest = rest[: len(_blocks(network))], rest[len(_blocks(network)) :]
            if isinstance(network, StepSequence):
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
    return list(network) if isinstance(network, (nn.Sequential, StepSequence)) else [network]


def step_sequences(model: nn.Module) -> list[StepSequence]:
    """A model's step sequences in order, one a stage, without those nested in a step of another."""
    sequences = [module for module in model.modules() if isinstance(module, StepSequence)]
    nested = {inner for sequence in sequences for inner in sequence.networks.modules()}
    return [sequence for sequence in sequences if sequence not in nested]


def blocks_of(model: nn.Module, steps: Sequence[int] | None = None) -> list[nn.Module]:
    """The residual blocks of any model in the order of its modules, the narrow ones of a StepsNet first.

    In a model without a StepsNet they are the members of its sequences of one kind, as every ``blocks`` or
    ``layers`` is, or of the ``blocks`` of such members, as in timm's stages; of its ``trunk``, where it has one, since
    heads may hold such sequences too.

    Args:
        steps: only the blocks of these steps, counted from 1 in each stage.

    Raises:
        ValueError: no stage has such a step.
    """
    sequences = step_sequences(model)
    if steps is not None:
        blocks, of_step = blocks_of(model), _step_of_each_block(model)
        most = max(of_step, default=0)
        if not all(1 <= step <= most for step in steps):
            raise ValueError(f"got steps {list(steps)}, expected some of the model's {most}, counted from 1")
        return [block for block, step in zip(blocks, of_step) if step in steps]
    if sequences:
        return [_innermost(block) for sequence in sequences for block in sequence]
    found: list[nn.Module] = []
    trunk = getattr(model, "trunk", None)
    for module in (trunk if isinstance(trunk, nn.Module) else model).modules():
        members = list(module) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []
        of_one_kind = len(members) > 1 and len({type(member) for member in members}) == 1
        if of_one_kind and any(True for _ in members[0].parameters()):
            found += [block for member in members for block in _blocks_of_stage(member)]
    nested = {inner for block in found for inner in block.modules() if inner is not block}
    return [block for block in dict.fromkeys(found) if block not in nested]  # a block may hold sequences too


def _blocks_of_stage(member: nn.Module) -> list[nn.Module]:
    blocks = getattr(member, "blocks", None)
    return list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else [member]


def is_flat(model: nn.Module) -> bool:
    """Whether it is a transformers model: its layers are in one list, its stream begins with the input embeddings."""
    return hasattr(getattr(model, "config", None), "widths")


def _step_of_each_block(model: nn.Module) -> list[int]:
    """Counted from 1 in each stage, in the order of execution."""
    stages = [[len(_blocks(network)) for network in sequence.networks] for sequence in step_sequences(model)]
    if is_flat(model):
        stages = [cast(Any, model).config.depths]
    return [step for depths in stages for step, depth in enumerate(depths, 1) for _ in range(depth)]


def widths_of(model: nn.Module) -> list[int]:
    """The width that each block of a StepsNet reads and writes, in the order of execution; empty without one."""
    if is_flat(model):
        config = cast(Any, model).config
        return [width for width, depth in zip(config.widths, config.depths) for _ in range(depth)]
    return [block.width for sequence in step_sequences(model) for block in sequence]


def _innermost(block) -> nn.Module:
    return _innermost(block.block) if isinstance(block, StreamBlock) else block
