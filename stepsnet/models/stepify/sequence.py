"""A StepsNet that takes the place of a container of blocks in an existing model, and keeps the blocks' names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.fx
from torch import Tensor, nn

from ...plan import check_steps, per_block
from ...residual.connected import JOINED, ConnectedSequence, check_begins
from ...residual.design import Wiring
from ...residual.joining import check_channels_last, connect_steps, wire_steps
from ...steps import StepsNet
from ...stream import StreamBlock, change_width, check_stream, cut_stream, module_of, recomputed

__all__ = ["StepSequence"]

torch.fx.wrap("check_stream")  # a leaf in symbolic traces, as in steps.py


class StepSequence(StepsNet):
    """A :class:`stepsnet.StepsNet` whose blocks are named 0, 1, 2, … over all steps, as in an ``nn.Sequential``.

    So everything that goes by the names of blocks continues to work, such as layer decay, feature extraction and LoRA.
    With one step, the state dict is that of the container that it replaces.

    Args:
        blocks: the blocks in the order of execution, or a mapping from their names.
        widths: C_1 … C_n, as for StepsNet.
        depths: blocks of each step, 0 or more.
        dim: the channel dimension.
        lead: the number of blocks in front of the first step that read or write other widths or resolutions than the
            stream's, such as the first block of a ResNet's stage; ``depths`` does not count them.
        stream_scale: a factor for the stream where it begins, after the leading blocks.

    Shape: (…, C, …) -> (…, C, …); with leading blocks, what these take -> (…, C, …).

    Raises:
        ValueError: widths and depths that do not match, or not as many blocks; in the forward pass, as StepsNet.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module] | Mapping[str, nn.Module],
        widths: Sequence[int],
        depths: Sequence[int],
        dim: int = -1,
        lead: int = 0,
        stream_scale: float = 1.0,
    ):
        nn.Module.__init__(self)
        check_steps(widths, depths)
        named = dict(blocks) if isinstance(blocks, Mapping) else {str(i): block for i, block in enumerate(blocks)}
        if len(named) != lead + sum(depths):
            raise ValueError(f"blocks: got {len(named)}, expected {lead + sum(depths)} for depths {tuple(depths)}")
        for name, block in named.items():
            self.add_module(name, block)
        self.widths, self.depths = tuple(widths), tuple(depths)
        self.width = max(self.widths)  # C
        self.slice_widths, self.slices_read = cut_stream(self.widths)
        self.dim = dim
        self.lead = lead
        self.stream_scale = stream_scale
        self.grad_checkpointing = False
        self.wirings: Sequence[Wiring] | None = None  # of the steps' streams, if a design joins their blocks
        self.begins: Sequence[bool] = [True] * len(self.depths)  # whether each step has the first block of its stream

    @property
    def names(self) -> list[str]:
        """The names of the blocks."""
        return [name for name in self._modules if name != "wirings"]

    @property
    def blocks(self) -> list[Any]:
        return [self._modules[name] for name in self.names]

    @property
    def networks(self) -> nn.ModuleList:  # type: ignore[override]
        """F_1 … F_n, as a StepsNet has them; they share the blocks."""
        steps = self.blocks_of_steps()
        if self.wirings:
            joined = [ConnectedSequence(blocks, wiring) for blocks, wiring in zip(steps, self.wirings)]
            for sequence, begins in zip(joined, self.begins):
                sequence.begins = begins
            return nn.ModuleList(joined)
        return nn.ModuleList(nn.Sequential(*blocks) for blocks in steps)

    def blocks_of_steps(self) -> list[list[nn.Module]]:
        blocks = iter(self.blocks[self.lead :])
        return [[next(blocks) for _ in range(depth)] for depth in self.depths]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.lead]:
            x = self._run(block, x)
        if self.stream_scale != 1.0:
            x = x * self.stream_scale
        y = check_stream(x, self.dim, self.width, 0)  # (…, C)
        waiting: list[Tensor] = []
        for i, blocks in enumerate(self.blocks_of_steps()):
            y, waiting = change_width(y, waiting, self.slices_read[i], self.slice_widths, self.dim)  # y: (…, C_i)
            y = check_stream(self._run_step(i, blocks, y), self.dim, self.widths[i], i + 1)
        y, waiting = change_width(y, waiting, len(self.slice_widths), self.slice_widths, self.dim)  # y: (…, C)
        return y

    def _run_step(self, step: int, blocks: Sequence[nn.Module], y: Tensor) -> Tensor:
        wiring = self.wirings[step] if self.wirings and blocks else None
        if wiring:
            check_begins(wiring, self.begins[step])
        state: Any = wiring.start(y) if wiring else y
        for block in blocks:
            state = self._run(block, state)
        return wiring.end(state) if wiring else state

    def _run(self, block: nn.Module, y: Tensor) -> Tensor:
        return recomputed(block, y) if self.grad_checkpointing else block(y)

    def blocks_per_step(self) -> list[int]:
        """The number of blocks of each step; leading blocks count as the first step's."""
        return [self.lead + self.depths[0], *self.depths[1:]]

    def __iter__(self) -> Iterator[StreamBlock]:
        widths = [self.width] * self.lead + per_block(self.widths, self.depths)
        for i, (block, width) in enumerate(zip(self._functions(), widths)):
            begin = self._begin_stream if i == self.lead else None
            checkpointed = self.grad_checkpointing and isinstance(block, nn.Module)
            yield StreamBlock(module_of(block), width, self.width, self.dim, checkpointed, begin, run=block)

    def _begin_stream(self, x: Tensor) -> Tensor:
        x = super()._begin_stream(x)
        return x if self.stream_scale == 1.0 else x * self.stream_scale

    def _functions(self) -> Iterator[Any]:
        """The blocks as functions of their step's stream."""
        yield from self.blocks[: self.lead]
        network: Any
        for network in self.networks:
            if isinstance(network, ConnectedSequence):
                network.set_grad_checkpointing(self.grad_checkpointing)
            yield from network

    def _places(self) -> list[tuple[nn.Module, str]]:
        if self.wirings:
            raise TypeError(JOINED)
        return [(self, name) for name in self.names]

    def _select(self, keep: Sequence[bool]) -> StepSequence:
        """Without the stream's beginning there is nothing to scale, so the scale is then 1."""
        kept = {name: block for name, block, chosen in zip(self.names, self.blocks, keep) if chosen}
        steps, firsts, start = [], [], self.lead
        for depth, begins in zip(self.depths, self.begins):
            steps.append(sum(keep[start : start + depth]))
            firsts.append(begins and any(keep[start : start + 1]))
            start += depth
        begins = self.lead < len(keep) and keep[self.lead]
        scale = self.stream_scale if begins else 1.0
        selected = StepSequence(kept, self.widths, steps, self.dim, sum(keep[: self.lead]), scale)
        selected.grad_checkpointing = self.grad_checkpointing
        selected.wirings, selected.begins = self.wirings, firsts
        selected.training = self.training  # not that of the blocks, which are shared
        selected._stream_hooks = self._stream_hooks if any(keep[:1]) else ()
        return selected

    def extra_repr(self) -> str:
        lead = f", lead={self.lead}" if self.lead else ""
        scale = f", stream_scale={self.stream_scale}" if self.stream_scale != 1.0 else ""
        return f"widths={self.widths}, depths={self.depths}, dim={self.dim}{lead}{scale}"


@connect_steps.register
def _(
    container: StepSequence, design: str, options: Mapping[str, Any], first: int = 1, num_blocks: int | None = None
) -> StepSequence:
    """Join the blocks in place: they keep their names. Leading blocks stay as they are."""
    check_channels_last(container, design)
    wirings = wire_steps(container.blocks_of_steps(), container.widths, design, options, first, num_blocks)
    if wirings is not None:
        container.wirings = nn.ModuleList(wirings).train(container.training)  # type: ignore[assignment]
    return container
