"""The residual stream of a StepsNet: where it is cut, how channels wait, and a block as a function of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

__all__ = ["StreamBlock", "change_width", "check_stream", "cut_stream", "module_of", "recomputed", "recomputed_as"]


def cut_stream(widths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where the stream is cut: the width of each slice, and how many slices each network reads.

    ``cut_stream((192, 272, 384))`` is ``[192, 80, 112], [1, 2, 3]``.
    """
    ends = sorted(set(widths))
    return [end - start for start, end in zip((0, *ends), ends)], [ends.index(width) + 1 for width in widths]


def change_width(
    y: Tensor, waiting: list[Tensor], slices: int, slice_widths: list[int], dim: int
) -> tuple[Tensor, list[Tensor]]:
    """Set channels aside, or take waiting ones back, until y holds the first ``slices`` slices of the stream.

    The stream is [y, *waiting] before and after. A step from narrow to wide is Eq. (5)'s [y_{i-1}, x_i], a step from
    wide to narrow is Eq. (6)'s Split; if the width stays the same, nothing is done.
    """
    held = len(slice_widths) - len(waiting)  # slices in y
    if slices < held:
        parts = torch.split(y, [sum(slice_widths[:slices])] + slice_widths[slices:held], dim)  # noqa: RUF005 - TorchScript
        return parts[0], [parts[i] for i in range(1, 1 + held - slices)] + waiting
    if slices > held:
        y = torch.cat([y] + [_beside(y, x) for x in waiting[: slices - held]], dim)
    return y, waiting[slices - held :]


@torch.fx.wrap  # a leaf in symbolic traces, where devices cannot be compared
def _beside(y: Tensor, x: Tensor) -> Tensor:
    """Waiting channels x on the device of y, where networks are spread over several."""
    return x if x.device == y.device else x.to(y.device)


@torch.fx.wrap  # a leaf in symbolic traces, where shapes cannot be compared; a call without a result would be dropped
def check_stream(y: Tensor, dim: int, width: int, step: int) -> Tensor:
    """Return y unchanged. Raises TypeError unless it is a tensor, ValueError unless it has ``width`` channels.

    Step 0 is the input.
    """
    if not isinstance(y, Tensor):
        where = f"output of step {step} of the StepsNet" if step > 0 else "input of the blocks"
        raise TypeError(f"{where}: got {type(y).__name__}, expected one tensor")
    if y.shape[dim] != width:
        where = f"output of step {step} of the StepsNet" if step > 0 else "input of the blocks"
        raise ValueError(f"{where}: got {y.shape[dim]} channels, expected {width}")
    return y


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, keep only its arguments, and run it again in the backward pass."""
    return recomputed_as(function, function, *args, **kwargs)


def recomputed_as(module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same as :func:`recomputed`, for a function that stands in for a module's forward pass.

    The running statistics of the module's norms count the call once.
    """
    parts = module.modules() if isinstance(module, nn.Module) else ()
    norms = [part for part in parts if isinstance(part, _NormBase) and part.training]
    if norms and not torch.compiler.is_compiling():  # the compiler takes no contexts but its own
        kwargs["context_fn"] = lambda: (nullcontext(), _StatisticsKept(norms))
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


class _StatisticsKept:
    """A context that restores the buffers of norms when it ends. A second backward pass enters it again."""

    def __init__(self, norms: Sequence[nn.Module]):
        self.norms = norms

    def __enter__(self) -> None:
        self.before = [(buffer, buffer.clone()) for norm in self.norms for buffer in norm.buffers(recurse=False)]

    def __exit__(self, *error: object) -> None:
        for buffer, before in self.before:
            buffer.data.copy_(before)  # through .data: autograd has saved the buffers, and need not know


class StreamBlock:
    """A block as a function of the whole residual stream: it rewrites the first ``width`` channels.

    The other channels are copied, so a loop over these blocks copies the full width once per block. Access to other
    attributes is forwarded to the block. Two wrappers of one block compare equal.

    Args:
        block: the module.
        run: what is called instead of it: a function of the first ``width`` channels, in a nested StepsNet or in a
            design of the stream.
    """

    __slots__ = ("__weakref__", "_begin", "_checkpointed", "_dim", "_stream_width", "block", "block_call", "width")

    def __init__(
        self,
        block: nn.Module,
        width: int,
        stream_width: int,
        dim: int,
        checkpointed: bool = False,
        begin: Callable[[Tensor], Tensor] | None = None,
        run: Callable[..., Tensor] | None = None,
    ):
        self.block, self.block_call = block, block if run is None else run
        self.width, self._stream_width, self._dim = width, stream_width, dim
        self._checkpointed = checkpointed
        self._begin = begin  # for the first block: what is done to the whole stream before it

    def __call__(self, z: Tensor, *args, **kwargs) -> Tensor:
        """z: (…, C), channels along ``dim`` -> the stream after this block, (…, C)."""
        if self._begin is not None:
            z = self._begin(z)
        untouched = self._stream_width - self.width
        if untouched == 0:
            return self._run(z, *args, **kwargs)
        y, waiting = torch.split(z, [self.width, untouched], self._dim)  # (…, C_i), (…, C - C_i)
        return torch.cat((self._run(y, *args, **kwargs), waiting), self._dim)  # (…, C)

    def _run(self, y: Tensor, *args, **kwargs) -> Tensor:
        return (
            recomputed(self.block_call, y, *args, **kwargs)
            if self._checkpointed
            else self.block_call(y, *args, **kwargs)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamBlock) and self.block is other.block

    def __hash__(self) -> int:
        return hash(getattr(self, "block", None))  # Dynamo, which compiles __init__, asks before ``block`` is set

    def __iter__(self):
        raise TypeError(
            f"StreamBlock: cannot iterate over {type(self.block).__name__} as a function of the whole stream, expected "
            "the module itself, which is its .block"
        )

    def __getattr__(self, name: str):
        if name in self.__slots__ or name.startswith("__"):  # copy and pickle ask before ``block`` is set
            raise AttributeError(name)
        return getattr(self.block, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.block, name, value)


def module_of(block: Any) -> Any:
    """The module behind a StreamBlock; anything else as it is."""
    return block.block if isinstance(block, StreamBlock) else block
