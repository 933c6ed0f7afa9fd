"""What the residual stream carries after each block: the shares of the input and the block's branch, and the gradient.

Sec. 3.1 of the paper defines the shortcut ratio γ_l = σ_0/σ_l. It is measured twice: on the whole stream, which Fig. 2
seems to draw, and on the channels that the block reads, which Eq. (2) is about (block_statistics.py). All measurements
of γ are made here: those at the ends of epochs, in updates, and by ``stepsnet analyze``. This works for any residual
model whose blocks run in sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..models.blocks import blocks_of, is_transformer_in_steps, step_sequences, widths_of
from ..models.compilation import buffers_as_before, running_eagerly
from ..stream import module_of
from .block_statistics import BlockStatistics, as_line
from .stream_observer import NoStream, StreamObserver

__all__ = ["NoStream", "measure_stream", "observe_stream", "stream_line", "stream_line_of"]


def measure_stream(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[BlockStatistics]:
    """Run ``loss(model)`` forward and backward, and take the statistics of every block on the way.

    Compiled blocks run eagerly here, since compiled code may leave out hooks. A model whose weights need no gradient is
    run forward only, and its gradients are NaN. In a model without a StepsNet, the channels of images, series and
    videos are dimension 1 or the last, as :func:`stepsnet.register_block` was told for the block's class, or as the
    sizes of the block's norms and biases say. If these leave it open, they are dimension 1 for blocks with convolutions
    or batch norms; in series and videos, only for those that begin with one.

    Args:
        model: in the mode that the caller has set. The mode and the running statistics of norms are kept, and the
            gradients are cleared.
        loss: a function that runs the model on a batch of real data and returns a scalar. If it calls the model several
            times, the first call counts.

    Returns:
        One entry per block, in the order of execution. If a block did not run, as with LayerDrop, everything but its
        width is NaN. Each stage of a hierarchical model starts from its own z_0. Sequences of torch's own layers, and
        those whose members do not run one after another, such as heads, are left out.

    Raises:
        UserError: the model has no sequence of blocks, does not call them, or adds their input to their output itself;
            or the loss is not a single number.
    """
    if not callable(loss):
        raise UserError(f"loss: got {type(loss).__name__}, expected a function of the model that returns one number")
    try:
        with buffers_as_before(model), running_eagerly(model), observe_stream(model) as blocks:
            value = loss(model)
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise UserError(f"loss: got {got}, expected a function of the model that returns one number")
            if value.requires_grad:
                value.backward()
    finally:  # if training goes on, it must not add its own gradients to these
        model.zero_grad(set_to_none=True)
    return blocks


@contextmanager
def observe_stream(model: nn.Module, loss_scale: float = 1.0) -> Iterator[list[BlockStatistics]]:
    """Take the statistics while something else runs the model forward and backward, such as a training update.

    Args:
        loss_scale: what the loss is multiplied by before the backward pass; gradients are divided by it.

    Yields:
        A list that, when the context ends, holds one entry per block, from the first pass within the context.

    Raises:
        NoStream: the model has no sequence of blocks; or, at the end, what has run is not a stream.
    """
    blocks = _blocks_by_path(model)
    observer = StreamObserver(type(model).__name__, blocks, _containers(model, blocks), widths_of(model), loss_scale)
    modules = list(blocks.values())
    statistics = list[BlockStatistics]()
    with ExitStack() as stack:
        for sequence in step_sequences(model):
            if not sequence.lead:
                stack.enter_context(sequence.stream_hook(observer.before_sequence))
            else:  # the stream begins after a block, which is observed
                last = list(sequence)[sequence.lead - 1]
                observer.scales_behind[modules.index(module_of(last))] = sequence.stream_scale
        if is_transformer_in_steps(model) and not hasattr(modules[0], "read_width"):
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            stack.callback(embedding.register_forward_hook(observer.after_embedding).remove)
        for index, module in enumerate(modules):
            hook = partial(observer.after_block, index)
            before = partial(observer.before_block, index)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(observer.after_model).remove)
        stack.callback(observer.forget)
        yield statistics
    statistics += observer.statistics()


def _blocks_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by their paths, without bare torch layers, such as several embeddings or heads, if there are others.

    Raises:
        NoStream: there are no blocks.
    """
    paths = {module: path for path, module in model.named_modules()}
    blocks = blocks_of(model)
    with_parts = [one for one in blocks if not (type(one).__module__.startswith("torch.nn.") and not [*one.children()])]
    if not blocks:
        raise NoStream(f"analyze: {type(model).__name__} has no sequence of residual blocks")
    return {paths[block]: block for block in with_parts or blocks}


def _containers(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """The path of what each block is in: a StepsNet, or else the module that holds it."""
    paths = {module: path for path, module in model.named_modules()}
    steps = [f"{path}.".removeprefix(".") for path in map(paths.get, step_sequences(model))]
    return [next((one for one in steps if path.startswith(one)), path.rpartition(".")[0]) for path in blocks]


@contextmanager
def stream_line(model: nn.Module, loss_scale: float) -> Iterator[dict[str, Any]]:
    """:func:`observe_stream` in a training update, as a line for ``metrics.jsonl``.

    A compiled model runs eagerly here, as in :func:`measure_stream`.

    Yields:
        A dictionary that is filled when the context ends. For a model without a stream, which trains all the same, it
        only has ``refused``, the reason.
    """
    line: dict[str, Any] = {}
    try:
        _blocks_by_path(model)
    except NoStream as error:
        yield {"refused": str(error)}
        return
    try:
        with running_eagerly(model), observe_stream(model, loss_scale=loss_scale) as blocks:
            yield line
    except NoStream as error:
        line["refused"] = str(error)
    else:
        line |= as_line(blocks, "update")


def stream_line_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """:func:`measure_stream` at an epoch's end, as a line for ``metrics.jsonl``."""
    return as_line(measure_stream(model, loss), "epoch_end")
