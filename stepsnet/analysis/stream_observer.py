"""Reconstructs the residual stream from what hooks on a model's blocks see, and takes its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.stepify.find_adapter import adapter_declared_for
from ..residual.channels import channel_dim
from ..residual.connected import ConnectedBlock
from ..steps import StepsNet
from .block_statistics import BlockStatistics

__all__ = ["NoStream", "StreamObserver"]


class NoStream(UserError):
    """Raised if what a model does with its blocks is not a residual stream."""


@dataclass
class _Run:
    """What went into a block and what came out of it."""

    x: Tensor
    y: Tensor
    version: int  # of x after the block

    def is_added(self, x: Tensor) -> bool:
        """Whether ``x``, which goes into the next block, is the sum of both: the model adds them, not the block."""
        if x is self.y:
            return False
        if x is self.x:
            return _version(x) != self.version  # it was written into
        if not x.shape == self.x.shape == self.y.shape or not x.device == self.x.device == self.y.device:
            return False
        with torch.no_grad():
            return torch.equal(x, self.x + self.y) and not torch.equal(x, self.y)


class StreamObserver:
    """The statistics of the first pass of a model, block by block.

    Its numbers stay on the device until :meth:`statistics` reads them.

    Args:
        name: the name of the model's class.
        blocks: the blocks by their paths, in the order of the model's modules.
        containers: the name of what each block is in.
        widths: the widths of the blocks if the model is in steps; else empty, and the containers may not be streams.
    """

    def __init__(
        self,
        name: str,
        blocks: Mapping[str, nn.Module],
        containers: Sequence[str],
        widths: Sequence[int],
        loss_scale: float,
    ):
        self.name, self.containers, self.loss_scale, self.known_widths = name, containers, loss_scale, widths
        self.places = [f"{path} ({type(block).__name__})" for path, block in blocks.items()]
        self.dim = -1  # of the channels
        self.input: Tensor | None = None  # z_0: (…, C)
        self.stream: Tensor | None = None  # z_{l-1}: (…, C)
        self.is_over = False  # whether the first pass is
        self.widths: dict[int, int] = {}  # by the index of the block, in the order of execution
        self.numbers: dict[int, Tensor] = {}  # (4,): gamma, gamma_read, branch, correlation
        self.gradients: dict[int, Tensor] = {}
        self.unread: dict[int, str] = {}  # why the call of a block, by its index, is not that of a stream
        self.scales_behind: dict[int, float] = {}  # of streams that begin after a block, by its index
        self.added: int | None = None  # a block whose input the model adds to its output
        self.written: list[int] = []  # blocks that change their input
        self._versions: dict[int, dict[int, int]] = {}  # of the tensors that a block gets, by its index
        self._started_in = ""  # the container of the block that the stream began with
        self._latest: tuple[int, _Run] | None = None
        self._last_of: dict[str, _Run] = {}  # the last in each container
        self._chained: set[str] = set()  # containers in which what comes out of a block goes into the next one
        self._beside: set[str] = set()  # containers in which two blocks get the same input

    def start_stream(self, z: Tensor, dim: int) -> None:
        self.input = self.stream = z.detach()
        self.dim = dim

    def before_sequence(self, sequence: StepsNet, x: Tensor) -> Tensor:
        self.start_stream(x * sequence.stream_scale, sequence.dim)
        return x

    def after_embedding(self, embedding: nn.Module, arguments: tuple, output: Tensor) -> None:
        self.start_stream(output, -1)

    def after_model(self, *call: Any) -> None:
        self.is_over = self.is_over or bool(self.numbers)

    def before_block(self, index: int, block: nn.Module, arguments: tuple, keywords: Mapping[str, Any]) -> None:
        tensors = (value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor))
        self._versions[index] = {id(tensor): _version(tensor) for tensor in tensors}

    def after_block(
        self, index: int, block: nn.Module, arguments: tuple, keywords: Mapping[str, Any], output: Any
    ) -> None:
        versions = self._versions.pop(index, {})
        if self.is_over or index in self.numbers:  # a second pass, or a recomputation
            return
        of_stream: Callable[[Tensor], Tensor] = _as_it_is
        if isinstance(block, ConnectedBlock):  # its state is several tensors, or one tensor of several streams
            y = output[-1] if isinstance(output, tuple) else output  # what the gradient is taken of
            with torch.no_grad():  # still detached: the sum of one stream is that tensor, with its graph
                before, after = block.wiring.as_sum(arguments[0]).detach(), block.wiring.as_sum(output).detach()
            of_stream = block.wiring.gradient_of_stream
        else:
            y = output[0] if isinstance(output, (tuple, list)) and output else output  # (…, C_i)
            x = _input_of(arguments, keywords, y)
            if x is None or not isinstance(y, Tensor):
                self.unread[index] = "gets no tensor" if isinstance(y, Tensor) else f"returns {_named(y)}"
                return
            if _version(x) != versions.get(id(x)):
                self.written.append(index)
            if not self.known_widths:
                self._note(index, x, y)
            before, after = x.detach(), y.detach()
        if (width := getattr(block, "read_width", None)) is not None:  # a transformers layer gets the whole stream
            before = before * block.stream_scale  # type: ignore[operator]
            if not self.numbers:
                self.start_stream(before, -1)
            before, after = before[..., :width], after[..., :width]
            of_stream = partial(_first_channels, width)
        if before.shape != after.shape or not self._continues_stream(before):  # no StepsNet, or a new stage
            self.start_stream(before if before.shape == after.shape else after, _channels_of(block, y))
            self._started_in = self.containers[index]
        self._take(index, before, after, y.device)
        if (scale := self.scales_behind.get(index, 1.0)) != 1.0:
            assert self.stream is not None
            self.start_stream(self.stream * scale, self.dim)
        if y.requires_grad:
            y.register_hook(partial(self._keep_gradient_norm, index, of_stream))

    def _note(self, index: int, x: Tensor, y: Tensor) -> None:
        """Note how the block relates to those before it, in a model whose containers may not be streams of blocks."""
        container = self.containers[index]
        if self._latest is not None:
            latest, run = self._latest
            if run.is_added(x) and self.added is None:
                self.added = latest
            is_new = container not in self._last_of and self.containers[latest] != container
            if is_new and not _same_memory(x, run.y):
                self.stream = None  # a new one begins, such as a decoder's after an encoder's
            if self._started_in != container and not self._is_stream(self._started_in):
                self.stream = None  # what embeddings returned, say, is not a stream that this block continues
        if (last := self._last_of.get(container)) is not None:
            if x is last.x and x is not last.y and _version(x) == last.version:
                self._beside.add(container)
            elif x is last.y or x.shape == last.y.shape:
                self._chained.add(container)
        self._last_of[container] = run = _Run(x, y, _version(x))
        self._latest = index, run

    def _is_stream(self, container: str) -> bool:
        """Whether a container's blocks run one after another, as far as is known; heads and embeddings do not."""
        if self.known_widths:
            return True
        ran = sum(self.containers[index] == container for index in self.numbers)
        return ran == 1 or (container in self._chained and container not in self._beside)

    def _take(self, index: int, before: Tensor, after: Tensor, device: torch.device) -> None:
        assert self.input is not None and self.stream is not None
        width, stream_width = after.shape[self.dim], self.stream.shape[self.dim]
        tail = self.stream.narrow(self.dim, width, stream_width - width)  # (…, C - C_i)
        self.stream = torch.cat((after, tail), self.dim)  # z_l: (…, C)
        input_read = self.input.narrow(self.dim, 0, width)  # (…, C_i)
        numbers = (
            self._sigma(self.input) / self._sigma(self.stream),
            self._sigma(input_read) / self._sigma(after),
            _norm(after - before) / _norm(before) if before.shape == after.shape else torch.tensor(nan),
            self._correlation(self.stream, self.input),
        )
        self.widths[index] = width
        self.numbers[index] = torch.stack([number.to(device, torch.float32) for number in numbers])

    def _keep_gradient_norm(self, index: int, of_stream: Callable[[Tensor], Tensor], gradient: Tensor) -> None:
        self.gradients[index] = _norm(of_stream(gradient)) / self.loss_scale

    def forget(self) -> None:
        """Drop what is kept of a pass, whose graph in turn holds this object's hooks."""
        self._latest = None
        self._last_of.clear()
        self._versions.clear()

    def statistics(self) -> list[BlockStatistics]:
        """One entry per block, in the order of execution; blocks that did not run come where the model has them.

        Containers whose blocks do not run one after another are left out if there are others.

        Raises:
            NoStream: no block has run, or what blocks are called with or return is not a stream; the model adds a
                block's input to its output, so that what the block returns is not the stream; a block overwrites its
                input, so that nothing is left of it.
        """
        if self.added is not None:
            raise NoStream(
                f"analyze: {self.name} adds what goes into {self.places[self.added]} to what comes out of it, expected "
                "blocks that return x + F(x) themselves: move the sum into their forward pass"
            )
        if not self.numbers:
            for index, reason in self.unread.items():
                raise NoStream(
                    f"analyze: {self.places[index]} {reason}, expected blocks that take one tensor and return one, or "
                    "several of which the first is the stream"
                )
            raise NoStream(
                f"analyze: {self.name} has called none of its {len(self.places)} blocks, the first of which is "
                f"{self.places[0]}, expected modules that it calls and that return x + F(x)"
            )
        ran = {self.containers[index] for index in self.numbers}
        keeping = {self.containers[index] for index, numbers in self.numbers.items() if not numbers[2].isnan()}
        kept = {container for container in ran if self._is_stream(container)}
        if not kept & (keeping or kept):  # several streams side by side, say, about which no more can be told
            kept = ran
        for index in self.written:
            if self.containers[index] in kept:
                raise NoStream(
                    f"analyze: {self.places[index]} changes its input in place, expected blocks that leave it as it "
                    "is: x = x + F(x) instead of x += F(x)"
                )
        order = list(self.numbers)
        for index, container in enumerate(self.containers):
            if index not in self.numbers and container in kept:
                order.insert(next((at for at, other in enumerate(order) if other > index), len(order)), index)
        return [self._entry(index) for index in order if self.containers[index] in kept]

    def _entry(self, index: int) -> BlockStatistics:
        if index not in self.numbers:
            like = (other for other in self.numbers if self.containers[other] == self.containers[index])
            width = self.known_widths[index] if self.known_widths else self.widths[next(like)]
            return BlockStatistics(width, nan, nan, nan, nan, nan)
        gamma, gamma_read, branch, correlation = self.numbers[index].tolist()
        gradient = self.gradients[index].item() if index in self.gradients else nan
        return BlockStatistics(self.widths[index], gamma, gamma_read, branch, correlation, gradient)

    def _continues_stream(self, before: Tensor) -> bool:
        """Whether the block's input belongs to the stream: it has the same shape, with as many channels or fewer."""
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


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _first_channels(width: int, gradient: Tensor) -> Tensor:
    return gradient[..., :width]


def _input_of(arguments: tuple, keywords: Mapping[str, Any], y: Any) -> Tensor | None:
    """The stream that a block is called with: its first argument, or the keyword argument of the output's shape."""
    if arguments:
        return arguments[0] if isinstance(arguments[0], Tensor) else None
    tensors = [value for value in keywords.values() if isinstance(value, Tensor)]
    alike = (one for one in tensors if isinstance(y, Tensor) and one.shape == y.shape)
    return next(alike, tensors[0] if tensors else None)


def _named(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _channels_of(block: nn.Module, y: Tensor) -> int:
    """The dimension of the channels in what a block returns, 1 or the last, as declared for its class or else found."""
    adapter = adapter_declared_for(block)
    return (adapter and adapter.dim) or channel_dim(block, y.shape)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _norm(x: Tensor) -> Tensor:
    """The norm, in float32 at least: in half precision the sum of squares soon overflows, or has only three digits."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
