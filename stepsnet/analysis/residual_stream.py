"""What the residual stream carries after each block: how much of the input, how much of the block, what gradient.

Sec. 3.1 asks for γ_l = σ_0/σ_l; beside it stand quantities that it stands for or that explain it. Any residual model
of blocks in sequence will do; the blocks of a StepsNet write the first C_i channels, and both views are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..stream import blocks_of, is_flat, step_sequences
from .block_statistics import BlockStatistics, as_line

__all__ = ["stream_line", "stream_line_of", "measure_stream", "observe_stream"]


def measure_stream(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], dim: int | None = None
) -> list[BlockStatistics]:
    """Run ``loss(model)`` forwards and backwards and look at every block on the way.

    Args:
        loss: a function of the model, on a batch of real data, that gives a scalar.
        dim: the channel dimension of a model without a StepsNet; by default 1 for blocks with convolutions
            and images (B, C, H, W), else the last.

    Returns:
        One entry a block, in the order of execution. A stage of a hierarchical model starts from its own z_0.
        The model's mode is kept, and its gradients are cleared.

    Raises:
        UserError: the model has no sequence of blocks.
    """
    # eagerly, since compiled blocks would leave the hooks out
    with torch.compiler.set_stance("force_eager"), observe_stream(model, dim) as signals:
        value = loss(model)
        if value.requires_grad:  # not that of averaged weights
            value.backward()
    model.zero_grad(set_to_none=True)
    return signals


@contextmanager
def observe_stream(
    model: nn.Module, dim: int | None = None, loss_scale: float = 1.0
) -> Iterator[list[BlockStatistics]]:
    """Look on while something else runs the model forwards and backwards, such as an update in training.

    Yields:
        A list that holds one entry a block when the context ends, of the first pass within it; ``dim`` as above,
        ``loss_scale`` is what the loss is multiplied by.

    Raises:
        UserError: the model has no sequence of blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(f"analyze: {type(model).__name__} has no sequence of residual blocks")
    watch, signals = _Watch(dim, len(blocks), loss_scale), list[BlockStatistics]()
    with ExitStack() as stack:
        for sequence in step_sequences(model):
            stack.callback(sequence.register_forward_pre_hook(watch.enter).remove)
        if is_flat(model):
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            stack.callback(embedding.register_forward_hook(watch.embed).remove)
        for block in blocks:
            stack.callback(block.register_forward_hook(watch.leave).remove)
        yield signals
    signals += watch.signals()


@contextmanager
def stream_line(model: nn.Module, loss_scale: float) -> Iterator[dict[str, Any]]:
    """:func:`watched`, as a line for ``metrics.jsonl``: what is not a number is None."""
    line: dict[str, Any] = {}
    with observe_stream(model, loss_scale=loss_scale) as signals:
        yield line
    line |= as_line(signals)


def stream_line_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """:func:`measure_stream`, as a line for ``metrics.jsonl``."""
    return as_line(measure_stream(model, loss))


class _Watch:
    """The residual stream, put together from what the hooks see; numbers stay on the device until they are read."""

    def __init__(self, dim: int | None, blocks: int, loss_scale: float):
        self.given_dim, self.blocks, self.loss_scale = dim, blocks, loss_scale
        self.start: Tensor | None = None  # z_0
        self.stream: Tensor | None = None  # z_{l-1}
        self.dim = -1
        self.widths: list[int] = []
        self.found: list[Tensor] = []  # γ, γ of what is read, branch, correlation
        self.gradients: dict[int, Tensor] = {}  # by block

    def begin(self, x: Tensor, dim: int) -> None:
        self.start = self.stream = x.detach()
        self.dim = dim

    def enter(self, sequence: nn.Module, arguments: tuple) -> None:
        self.begin(arguments[0], sequence.dim)  # type: ignore[arg-type]

    def embed(self, embedding: nn.Module, arguments: tuple, output: Tensor) -> None:
        self.begin(output, -1)

    def leave(self, block: nn.Module, arguments: tuple, output: Any) -> None:
        if len(self.found) == self.blocks:  # a second pass
            return
        y = output[0] if isinstance(output, tuple) else output
        before = arguments[0].detach()
        if before.shape != y.shape or self.stream is None or not self._fits(before):  # no StepsNet, or a new stage
            convolves = y.ndim == 4 and any(isinstance(module, nn.Conv2d) for module in block.modules())
            dim = self.given_dim if self.given_dim is not None else (1 if convolves else -1)
            self.begin(before if before.shape == y.shape else y, dim)
        width = y.shape[self.dim]
        assert self.start is not None and self.stream is not None
        after = y.detach()
        tail = self.stream.narrow(self.dim, width, self.stream.shape[self.dim] - width)
        self.stream = torch.cat((after, tail), self.dim)
        read = self.start.narrow(self.dim, 0, width)
        change = (after - before).norm() / before.norm() if before.shape == after.shape else torch.tensor(float("nan"))
        numbers = (
            self._sigma(self.start) / self._sigma(self.stream),
            self._sigma(read) / self._sigma(after),
            change,
            self._correlation(self.stream, self.start),
        )
        self.widths.append(width)
        self.found.append(torch.stack([number.to(y.device, torch.float32) for number in numbers]))
        if y.requires_grad:
            y.register_hook(partial(self._keep_norm, len(self.found) - 1))

    def _keep_norm(self, block: int, gradient: Tensor) -> None:
        self.gradients[block] = gradient.norm() / self.loss_scale

    def signals(self) -> list[BlockStatistics]:
        none = torch.tensor(float("nan"))
        gradients = [self.gradients.get(block, none).item() for block in range(len(self.found))]
        signals = []
        for width, numbers, gradient in zip(self.widths, self.found, gradients):
            gamma, gamma_read, branch, correlation = numbers.tolist()
            signals.append(BlockStatistics(width, gamma, gamma_read, branch, correlation, gradient))
        return signals

    def _fits(self, before: Tensor) -> bool:
        """Whether the block goes on with the stream: the same places, no more channels."""
        assert self.stream is not None
        ours, theirs = list(self.stream.shape), list(before.shape)
        if len(ours) != len(theirs):
            return False
        channels = ours.pop(self.dim), theirs.pop(self.dim)
        return ours == theirs and channels[1] <= channels[0]

    def _sigma(self, z: Tensor) -> Tensor:
        return z.float().std(self.dim).mean()

    def _correlation(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (z.float() - z.float().mean(self.dim, keepdim=True) for z in (a, b))
        return nn.functional.cosine_similarity(a, b, self.dim).mean()
