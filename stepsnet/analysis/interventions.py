"""Metrics of a trained network after removing some of its channels or blocks (Tables 6 and 7), without retraining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.blocks import blocks_of, is_in_steps, is_transformer_in_steps, step_sequences, widths_of
from ..models.compilation import running_eagerly
from ..residual.connected import ConnectedBlock
from ..steps import StepsNet

__all__ = ["OneStep", "drop_each", "drop_steps", "dropped", "mask_paths", "masked"]

Evaluate = Callable[[nn.Module], dict[str, float]]


class OneStep(UserError):
    """Raised for a model that has no steps to take apart, such as a baseline."""


class Reshapes(UserError):
    """Raised for a block whose output has another shape than its input, such as the first one of a stage."""


@contextmanager
def masked(model: Any, share: float, path: str) -> Iterator[None]:
    """Set some channels of the input x, (…, C), of every StepsNet of several steps to zero.

    Args:
        share: how many channels, as a share of the slow path's width.
        path: "slow" masks the first channels, which every block reads; "fast" masks the last ones, at most all of
            those that wait.
    """

    def mask(x: Tensor, widths: Sequence[int], dim: int) -> Tensor:
        count, full = _masked_channels(widths, share, path), max(widths)
        kept = torch.ones(full, dtype=x.dtype, device=x.device)
        kept[slice(0, count) if path == "slow" else slice(full - count, None)] = 0
        return x * kept.view(-1, *[1] * (x.ndim - dim % x.ndim - 1))

    def before(sequence: StepsNet, x: Tensor) -> Tensor:
        if sequence.lead:
            raise UserError(
                f"analyze: a stream of {type(model).__name__} begins after the first block of its stage, expected "
                "stages whose blocks all keep the width"
            )
        return mask(x, sequence.widths, sequence.dim)

    with ExitStack() as stack:
        stack.enter_context(running_eagerly(model))
        for sequence in step_sequences(model):
            if len(sequence.widths) > 1:
                stack.enter_context(sequence.stream_hook(before))
        if is_transformer_in_steps(model):
            widths, first = model.config.widths, blocks_of(model)[0]
            if hasattr(first, "read_width"):  # a layer that reads the whole stream
                handle = first.register_forward_pre_hook(lambda layer, x: (mask(x[0], widths, -1), *x[1:]))
            else:
                embedding = model.get_input_embeddings()
                handle = embedding.register_forward_hook(lambda module, arguments, x: mask(x, widths, -1))
            stack.callback(handle.remove)
        yield


@contextmanager
def dropped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Make blocks return their input or, in a design of the residual stream, make their branches return zero.

    Code that was compiled before does not notice; see :func:`stepsnet.models.compilation.running_eagerly`.

    Raises:
        Reshapes: when the model runs, if a block's output has another shape than its input.
    """
    with ExitStack() as stack:
        for block in blocks:
            if isinstance(block, ConnectedBlock):
                stack.enter_context(_running(block, block.without_branches))
            else:
                stack.callback(block.register_forward_hook(_give_input, with_kwargs=True).remove)
        yield


@contextmanager
def _running(block: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a block's forward pass, which may itself be a replacement, such as one that recomputes."""
    own = block.__dict__.get("forward")
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def mask_paths(model: nn.Module, evaluate: Evaluate, parts: int = 6) -> list[dict[str, Any]]:
    """Table 6: the metrics with 0, 1/6, …, 5/6 of the slow path's channels masked, at either end of x.

    There is one row per number of channels, up to where all that wait are masked; in a hierarchical model, a row gives
    a number for each stage of several steps, such as "8, 16".

    Raises:
        OneStep: the model has a single step.
    """
    _check_in_steps(model)
    streams = [sequence.widths for sequence in step_sequences(model) if len(sequence.widths) > 1]
    if is_transformer_in_steps(model):
        streams = [cast(Any, model).config.widths]
    rows: list[dict[str, Any]] = []
    for path in ("slow", "fast"):
        before: list[int] | None = None
        for part in range(parts):
            counts = [_masked_channels(widths, part / parts, path) for widths in streams]
            if counts == before:
                break
            with masked(model, part / parts, path):
                metrics = rows[0]["metrics"] if rows and part == 0 else evaluate(model)
            channels = counts[0] if len(counts) == 1 else ", ".join(map(str, counts))
            rows.append({"path": path, "channels": channels, "metrics": metrics})
            before = counts
    return rows


def drop_steps(model: nn.Module, evaluate: Evaluate) -> list[dict[str, Any]]:
    """Table 7: the metrics without the last blocks of each step in turn.

    The dropped blocks of a step have about as many parameters as the largest block: these are 4, 2 and 1 blocks for
    three widths √2 apart. In a hierarchical model, each stage has its own steps and its own largest block. A step with
    too few blocks for that is dropped as a whole, and its row says so.

    Raises:
        OneStep: the model has a single step.
    """
    _check_in_steps(model)
    blocks, widths = blocks_of(model), widths_of(model)
    params = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    rows: list[dict[str, Any]] = [{"dropped": "nothing", "blocks": [], "metrics": _without([], model, evaluate)}]
    has_stages = len(step_sequences(model)) > 1
    for stage, (first, last) in _stages(model).items():
        of_stage = f" of stage {stage}" if has_stages else ""
        most = max(params[first:last])
        steps = [list(step) for _, step in groupby(range(first, last), key=widths.__getitem__)]
        of_width = Counter(widths[step[0]] for step in steps)
        for number, inside in enumerate(steps, 1):
            width = widths[inside[-1]]
            which = f" in step {number}" if of_width[width] > 1 else ""
            alike = max(round(most / params[inside[-1]]), 1)
            chosen = inside[-alike:]
            few = f" ({alike} would be as large as the largest block)" if alike > len(inside) else ""
            dropped_blocks = f"last {len(chosen)} of width {width}{which}{of_stage}{few}"
            metrics = _without([blocks[index] for index in chosen], model, evaluate)
            rows.append({"dropped": dropped_blocks, "blocks": chosen, "metrics": metrics})
    return rows


def drop_each(model: nn.Module, evaluate: Evaluate) -> list[dict[str, Any]]:
    """The metrics without each single block in turn, for any residual model; this goes beyond Table 7.

    A block that changes the width or the resolution has no metrics, since nothing can take its place.
    """
    blocks, widths = blocks_of(model), widths_of(model)
    rows = []
    for index, block in enumerate(blocks):
        metrics: dict[str, float] = {}
        with suppress(Reshapes):
            metrics = _without([block], model, evaluate)
        rows.append({"block": index, "width": widths[index] if widths else None, "metrics": metrics})
    return rows


def _without(blocks: Sequence[nn.Module], model: nn.Module, evaluate: Evaluate) -> dict[str, float]:
    with running_eagerly(model), dropped(blocks):  # compiled code would not notice that they are dropped
        return evaluate(model)


def _masked_channels(widths: Sequence[int], share: float, path: str) -> int:
    slow, full = min(widths), max(widths)
    return min(round(share * slow), slow if path == "slow" else full - slow)


def _give_input(block: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A hook that replaces the block's output by its input; of several outputs, only the first."""
    x = arguments[0] if arguments else next(iter(kwargs.values()))
    y, *others = output if isinstance(output, tuple) else (output,)
    if x.shape != y.shape:
        got = f"{type(block).__name__}, which turns {tuple(x.shape)} into {tuple(y.shape)}"
        raise Reshapes(f"analyze: got {got}, expected a block that keeps the shape")
    x = x * getattr(block, "stream_scale", 1.0)  # of the stream, not of what the block adds to it
    return (x, *others) if isinstance(output, tuple) else x


def _check_in_steps(model: nn.Module) -> None:
    if not is_in_steps(model):
        raise OneStep("analyze: the model has 1 step, expected a StepsNet of several")


def _stages(model: nn.Module) -> dict[int, tuple[int, int]]:
    """The indices (first, last + 1) of the blocks of each stage of several steps, by the stage's number."""
    sequences = step_sequences(model)
    if not sequences:
        return {1: (0, len(blocks_of(model)))}
    found, start = {}, 0
    for stage, sequence in enumerate(sequences, 1):
        if len(sequence.widths) > 1:
            found[stage] = (start + sequence.lead, start + len(sequence))  # leading blocks change the shape
        start += len(sequence)
    return found
