"""What the residual stream carries after each block: the share of the input, of the block's branch, and the gradient.

Sec. 3.1 of the paper defines the shortcut ratio γ_l = σ_0/σ_l. It is measured twice: on the whole stream, which
Fig. 2 seems to draw, and on the channels that the block reads, which Eq. (2) is about (block_statistics.py). This is
the only measurement of γ: at the ends of epochs, in updates, and by ``stepsnet analyze``. It works for any residual
model whose blocks run in sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.blocks import blocks_of, is_transformer_in_steps, step_sequences
from ..models.compilation import running_eagerly
from ..residual.connected import ConnectedBlock
from ..steps import StepsNet
from .block_statistics import BlockStatistics, as_line

__all__ = ["measure_stream", "observe_stream", "stream_line", "stream_line_of"]


def measure_stream(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[BlockStatistics]:
    """Run ``loss(model)`` forward and backward, and take the statistics of every block on the way.

    Compiled blocks run eagerly here, since compiled code may leave hooks out. A model whose weights need no gradient
    is run forward only, and its gradients are not a number. In a model without a StepsNet the channels of images are
    dimension 1 or the last, as the sizes of the block's norms and biases say; where these leave it open, dimension 1
    for blocks with convolutions.

    Args:
        model: in the mode that the caller has set; the mode is kept, and the gradients are cleared.
        loss: a function of the model, on a batch of real data, that returns a scalar.

    Returns:
        One entry per block, in the order of execution. Each stage of a hierarchical model starts from its own z_0.

    Raises:
        UserError: the model has no sequence of blocks, or the loss is no number.
    """
    if not callable(loss):
        raise UserError(f"loss: got {type(loss).__name__}, expected a function of the model that returns one number")
    with running_eagerly(model), observe_stream(model) as blocks:
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"loss: got {got}, expected a function of the model that returns one number")
        if value.requires_grad:
            value.backward()
    model.zero_grad(set_to_none=True)
    return blocks


@contextmanager
def observe_stream(model: nn.Module, loss_scale: float = 1.0) -> Iterator[list[BlockStatistics]]:
    """Take the statistics while something else runs the model forward and backward, such as an update in training.

    Args:
        loss_scale: what the loss is multiplied by before the backward pass; gradients are divided by it.

    Yields:
        A list that holds one entry per block when the context ends, of the first pass within it.

    Raises:
        UserError: the model has no sequence of blocks.
    """
    modules = blocks_of(model)
    if not modules:
        raise UserError(f"analyze: {type(model).__name__} has no sequence of residual blocks")
    observer, blocks = _Observer(len(modules), loss_scale), list[BlockStatistics]()
    with ExitStack() as stack:
        for sequence in step_sequences(model):
            if not sequence.lead:  # else the stream begins behind a block, which is observed
                stack.enter_context(sequence.stream_hook(observer.before_sequence))
        if is_transformer_in_steps(model) and not hasattr(modules[0], "read_width"):
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            stack.callback(embedding.register_forward_hook(observer.after_embedding).remove)
        for module in modules:
            stack.callback(module.register_forward_hook(observer.after_block).remove)
        yield blocks
    blocks += observer.statistics()


@contextmanager
def stream_line(model: nn.Module, loss_scale: float) -> Iterator[dict[str, Any]]:
    """:func:`observe_stream` in an update in training, as a line for ``metrics.jsonl``.

    A compiled model runs eagerly here, as in :func:`measure_stream`.

    Yields:
        A dictionary that is filled when the context ends.
    """
    line: dict[str, Any] = {}
    with running_eagerly(model), observe_stream(model, loss_scale=loss_scale) as blocks:
        yield line
    line |= as_line(blocks, "update")


def stream_line_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """:func:`measure_stream` at an epoch's end, as a line for ``metrics.jsonl``."""
    return as_line(measure_stream(model, loss), "epoch_end")


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _channels_of(block: nn.Module, y: Tensor) -> int:
    """The dimension of the channels in what a block returns."""
    if y.ndim != 4:
        return -1
    sizes = {parameter.shape[0] for parameter in block.parameters() if parameter.ndim == 1}
    if (y.shape[1] in sizes) != (y.shape[-1] in sizes):
        return 1 if y.shape[1] in sizes else -1
    return 1 if any(isinstance(module, nn.Conv2d) for module in block.modules()) else -1


def _first_channels(width: int, gradient: Tensor) -> Tensor:
    return gradient[..., :width]


class _Observer:
    """Puts the whole residual stream together from what the hooks see.

    Its numbers stay on the device until :meth:`statistics` reads them.
    """

    def __init__(self, num_blocks: int, loss_scale: float):
        self.num_blocks, self.loss_scale = num_blocks, loss_scale
        self.dim = -1  # of the channels
        self.input: Tensor | None = None  # z_0: (…, C)
        self.stream: Tensor | None = None  # z_{l-1}: (…, C)
        self.widths: list[int] = []
        self.numbers: list[Tensor] = []  # one (4,) per block: gamma, gamma_read, branch, correlation
        self.gradients: dict[int, Tensor] = {}  # by the index of the block

    def start_stream(self, z: Tensor, dim: int) -> None:
        self.input = self.stream = z.detach()
        self.dim = dim

    def before_sequence(self, sequence: StepsNet, x: Tensor) -> Tensor:
        self.start_stream(x * sequence.stream_scale, sequence.dim)
        return x

    def after_embedding(self, embedding: nn.Module, arguments: tuple, output: Tensor) -> None:
        self.start_stream(output, -1)

    def after_block(self, block: nn.Module, arguments: tuple, output: Any) -> None:
        if len(self.numbers) == self.num_blocks:  # a second pass
            return
        y = output[0] if isinstance(output, tuple) else output  # (…, C_i)
        of_stream: Callable[[Tensor], Tensor] = _as_it_is
        if isinstance(block, ConnectedBlock):  # its stream is several tensors, or one of several streams
            y = output[-1] if isinstance(output, tuple) else output  # what the gradient is taken of
            with torch.no_grad():  # detached all the same: the sum of one stream is that tensor, with its graph
                before, after = block.wiring.as_sum(arguments[0]).detach(), block.wiring.as_sum(output).detach()
            of_stream = block.wiring.gradient_of_stream
        else:
            before, after = arguments[0].detach(), y.detach()
        if (width := getattr(block, "read_width", None)) is not None:  # a layer of transformers: the whole stream
            before = before * block.stream_scale  # type: ignore[operator]
            if not self.numbers:
                self.start_stream(before, -1)
            before, after = before[..., :width], after[..., :width]
            of_stream = partial(_first_channels, width)
        if before.shape != after.shape or not self._continues_stream(before):  # no StepsNet, or a new stage
            self.start_stream(before if before.shape == after.shape else after, _channels_of(block, y))
        assert self.input is not None and self.stream is not None
        width, stream_width = after.shape[self.dim], self.stream.shape[self.dim]
        tail = self.stream.narrow(self.dim, width, stream_width - width)  # (…, C - C_i)
        self.stream = torch.cat((after, tail), self.dim)  # z_l: (…, C)
        input_read = self.input.narrow(self.dim, 0, width)  # (…, C_i)
        unknown = torch.tensor(float("nan"))
        numbers = (
            self._sigma(self.input) / self._sigma(self.stream),
            self._sigma(input_read) / self._sigma(after),
            _norm(after - before) / _norm(before) if before.shape == after.shape else unknown,
            self._correlation(self.stream, self.input),
        )
        self.widths.append(width)
        self.numbers.append(torch.stack([number.to(y.device, torch.float32) for number in numbers]))
        if y.requires_grad:
            y.register_hook(partial(self._keep_gradient_norm, len(self.numbers) - 1, of_stream))

    def _keep_gradient_norm(self, block: int, of_stream: Callable[[Tensor], Tensor], gradient: Tensor) -> None:
        self.gradients[block] = _norm(of_stream(gradient)) / self.loss_scale

    def statistics(self) -> list[BlockStatistics]:
        unknown = torch.tensor(float("nan"))
        gradients = [self.gradients.get(block, unknown).item() for block in range(len(self.numbers))]
        statistics = []
        for width, numbers, gradient in zip(self.widths, self.numbers, gradients):
            gamma, gamma_read, branch, correlation = numbers.tolist()
            statistics.append(BlockStatistics(width, gamma, gamma_read, branch, correlation, gradient))
        return statistics

    def _continues_stream(self, before: Tensor) -> bool:
        """Whether the block's input belongs to the stream: the same shape, but for fewer channels or as many."""
        if self.stream is None:
            return False
        ours, theirs = list(self.stream.shape), list(before.shape)
        if len(ours) != len(theirs):
            return False
        channels, theirs_channels = ours.pop(self.dim), theirs.pop(self.dim)
        return ours == theirs and theirs_channels <= channels

    def _sigma(self, z: Tensor) -> Tensor:
        """The standard deviation over the channels of each token, averaged over tokens and samples."""
        return z.float().std(self.dim).mean()

    def _correlation(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (z.float() - z.float().mean(self.dim, keepdim=True) for z in (a, b))
        return nn.functional.cosine_similarity(a, b, self.dim).mean()


def _norm(x: Tensor) -> Tensor:
    """In float32 at least: of half precision the sum of squares overflows soon, or has three digits."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
