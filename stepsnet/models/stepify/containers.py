"""The containers of residual blocks of one kind in a model, found by running it on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError, in_a_line
from ...macs import OF_MODULES, on_meta, with_own_tensors
from ...residual.channels import channel_dim
from ...residual.known_blocks import check_declared
from ...steps import StepsNet
from ..blocks import members_of
from .adapters import BlockAdapter
from .example import Example
from .find_adapter import adapter_of
from .watch import BlockUses, has_shortcut

__all__ = ["Container", "find_containers", "trace_blocks"]

TEN_LINES = "stepsnet.register_block(%s, rebuild) adds an adapter, with a function rebuild(block, width, heads)"


@dataclass(frozen=True)
class Container:
    """Residual blocks of one class that run one after another, in a model."""

    path: str
    blocks: list[nn.Module]
    adapter: BlockAdapter
    lead: int  # blocks at the beginning that change the width or the resolution
    width: int  # C
    dim: int
    call: Example  # what the first block after the leading ones is called with
    read_behind: tuple[int, ...] = ()  # the blocks before the last one whose output the model reads as well
    stage: int = 1  # its stage of the model, counted from 1; stages that cannot be in steps are counted too
    passes: int = 1  # how often the model runs it

    @property
    def depth(self) -> int:
        return len(self.blocks) - self.lead

    @property
    def template(self) -> nn.Module:
        return self.blocks[self.lead]

    def call_at(self, width: int) -> Example:
        """The same call on the first ``width`` channels of the stream."""
        stream, *others = self.call.args
        shape = list(stream.shape)
        shape[self.dim] = width
        return Example((stream.new_empty(shape), *others), self.call.kwargs)


@dataclass
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape_in: torch.Size
    shape_out: torch.Size
    times: int = 1

    @property
    def keeps_shape(self) -> bool:
        return self.shape_in == self.shape_out


def find_containers(model: nn.Module, example: Example) -> list[Container]:
    """Find the containers, in the order of the model's modules, which in a hierarchical model is that of its stages.

    Raises:
        UserError: there is none; a block changes the width or the resolution after others that keep them; a block has
            no adapter; the model adds a block's input to its output, which the block should do itself. A container
            whose blocks change the stream, have no adapter, are not residual or do not follow each other is left out
            if there is another.
    """
    in_place = next((path for path, module in model.named_modules() if isinstance(module, StepsNet)), None)
    if in_place is not None:
        raise UserError(
            f"stepify: {in_place or type(model).__name__} is in steps already, or in a design of the residual stream, "
            "expected a plain model"
        )
    seen = _Seen(model, example)
    found: list[Container] = []
    refused: list[tuple[bool, bool, int, str]] = []  # (keep the stream, are several, parameters, reason)
    inside: set[nn.Module] = set()
    for path, blocks in seen.candidates.items():
        if blocks[0] in inside:
            continue
        one = seen.container(path, blocks)
        if isinstance(one, Container):
            found.append(one)
            inside |= {module for block in blocks for module in block.modules()}
        elif one:
            keep = all(seen.calls[block].keeps_shape for block in blocks if block in seen.calls)
            refused.append((keep, len(blocks) > 1, _size_of(blocks), one))
    if not found:
        if refused:
            raise UserError(f"stepify: {max(refused)[-1]}")  # of the candidate nearest to a StepsNet's container
        raise UserError(
            f"stepify: {type(model).__name__} has no container of blocks of one kind, expected an "
            "nn.Sequential or nn.ModuleList of residual blocks of one class that keep the shape of their input"
        )
    return [replace(one, stage=stage) for one, stage in zip(found, _stages_of(found, list(seen.candidates)))]


class _Seen:
    """A model's sequences of blocks of one class, and what a forward pass on the meta device shows of each block."""

    def __init__(self, model: nn.Module, example: Example):
        traced = on_meta(model)
        self.name = type(model).__name__
        self.original = dict(zip(traced.modules(), model.modules()))
        self.candidates = dict(_candidates(traced))
        self.unfit: dict[nn.Module, str] = {}
        every = [block for blocks in self.candidates.values() for block in blocks]
        with BlockUses(self.candidates) as self.uses:
            self.calls, outputs = _trace(traced, every, example, self.unfit)
        self.uses.note_read(outputs)

    def container(self, path: str, blocks: list[nn.Module]) -> Container | str | None:
        """Return the container; or, if it could have been one, why it is not; or None if the blocks form no stream.

        Raises:
            UserError: it would be one, but for something that the user has to fix.
        """
        if blocks[0] in self.unfit:
            return f"{path}.0 ({type(blocks[0]).__name__}) {self.unfit[blocks[0]]}"
        if not all(block in self.calls for block in blocks):
            return None
        if len(set(blocks)) < len(blocks):
            raise UserError(f"stepify: {path} holds one block several times, expected blocks with weights of their own")
        keeping = [i for i, block in enumerate(blocks) if self.calls[block].keeps_shape]
        if not keeping:
            return None
        lead = keeping[0]
        if beside := [i for i, block in enumerate(blocks) if block in self.uses.beside]:
            return f"{path}.{beside[0]} gets the same input as another block of {path}, expected blocks in a row"
        first = self.calls[blocks[lead]]
        dim = channel_dim(blocks[lead], first.shape_in)
        originals, changing = [self.original[block] for block in blocks], {*range(lead, len(blocks))} - {*keeping}
        adapter = adapter_of(originals[lead], first.shape_in[dim], originals[lead + 1 :])
        if changing or adapter is None:
            return _refusal(path, blocks, sorted(changing), first.shape_in[dim], dim)
        if _size_of(blocks) > sum(parameter.numel() for parameter in nn.ModuleList(blocks).parameters()):
            return f"{path} has parameters that its blocks share, expected blocks with weights of their own"
        dim = adapter.dim or dim
        check_declared(originals[lead])
        kind = f"{path}.{lead} ({type(blocks[lead]).__name__})"
        self._check_stream(kind, blocks)
        if not has_shortcut(blocks[lead], first.args, first.kwargs):
            return f"{kind} multiplies its whole input by weights, expected blocks that return x + F(x)"
        if changed := [i for i in range(lead + 1, len(blocks)) if blocks[i] in self.uses.changed]:
            return (
                f"{path}.{changed[0]} ({type(blocks[lead]).__name__}) does not get what the block before it returns: "
                "in steps, a change in between would reach the channels that wait, too; expected blocks in a row, with "
                f"what {self.name} does between them moved into the blocks"
            )
        read = tuple(i for i in range(lead, len(blocks) - 1) if blocks[i] in self.uses.read)
        call = Example(first.args, first.kwargs)
        return Container(path, originals, adapter, lead, first.shape_in[dim], dim, call, read, passes=first.times)

    def _check_stream(self, kind: str, blocks: Sequence[nn.Module]) -> None:
        """Raises UserError if a block writes into its input, or the model adds a block's input to its output."""
        if self.uses.written.intersection(blocks):
            raise UserError(
                f"stepify: {kind} writes into its input, whose memory the rest of the stream would share, expected "
                "x = x + F(x) in its forward pass, not x += F(x)"
            )
        if self.uses.summed.intersection(blocks):
            raise UserError(
                f"stepify: {self.name} adds what goes into {kind} to what comes out of it, expected blocks "
                "that return x + F(x) themselves: move the sum into their forward pass"
            )


def _size_of(blocks: Sequence[nn.Module]) -> int:
    """The number of parameters; one that blocks share is counted once for each of them."""
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _stages_of(found: Sequence[Container], paths: Sequence[str]) -> list[int]:
    """The stage of each container, counted among all sequences at paths of one pattern, such as ``stages.2.blocks``.

    If the containers' paths have several patterns, only the containers are counted.
    """
    patterns = {_pattern(one.path) for one in found}
    like = [path for path in paths if _pattern(path) in patterns]
    return [like.index(one.path) + 1 if len(patterns) == 1 else i for i, one in enumerate(found, 1)]


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _candidates(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Sequences of modules of one class, with submodules and parameters; those inside a block of another follow it."""
    for path, module in model.named_modules():
        members = members_of(module) if type(module) in (nn.Sequential, nn.ModuleList) else []
        if members and len({type(member) for member in members}) == 1:
            has_parts = next(members[0].children(), None) is not None
            if has_parts and next(members[0].parameters(), None) is not None:
                yield path, members


def trace_blocks(model: nn.Module, blocks: list[nn.Module], example: Example) -> dict[nn.Module, _Call]:
    """How each block is called in a forward pass of a copy of the model without data.

    Blocks that do not take a tensor first and return one are left out.
    """
    traced = on_meta(model)
    copies = dict(zip(model.modules(), traced.modules()))
    calls, _ = _trace(traced, [copies[block] for block in blocks], example, {})
    return {block: calls[copies[block]] for block in blocks if copies[block] in calls}


def _trace(
    traced: nn.Module, blocks: list[nn.Module], example: Example, unfit: dict[nn.Module, str]
) -> tuple[dict[nn.Module, _Call], Any]:
    """How each block is called in a model on the meta device, and what the model returns.

    Args:
        unfit: is filled with the reason for each block that cannot be one of a StepsNet, y = F(x) of one tensor.
    """
    calls: dict[nn.Module, _Call] = {}

    def run() -> Any:
        calls.clear()
        return example.run(traced)

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple):  # known families of transformers, which ignore ``unfit``, have the stream first
            unfit[block] = "returns a tuple, expected one tensor"
            output = output[0]
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            if block in calls:
                calls[block].times += 1
            else:
                calls[block] = _Call(args, kwargs, args[0].shape, output.shape)
        elif not args:
            unfit[block] = "gets its input by keyword, expected it as the first argument of the call"

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_hook(note, with_kwargs=True).remove)
        try:
            outputs = with_own_tensors(run)
        except OF_MODULES as error:
            raise UserError(f"stepify: {type(traced).__name__} {_why_not(error)}") from error
    return calls, outputs


def _why_not(error: Exception) -> str:
    """Why a model does not run on the meta device."""
    reason = in_a_line(error)[:200]
    if re.search("meta tensor|meta device|register_meta|'Meta' backend", str(error)):
        return (
            f"does not run without data, on torch's meta device ({reason}), expected a forward pass that reads "
            "only shapes, not values; see docs/your-model.md"
        )
    return f"does not take the example input ({reason})"


def _refusal(path: str, blocks: list[nn.Module], changing: list[int], width: int, dim: int) -> str:
    name = type(blocks[-1]).__name__
    if changing:
        return (
            f"{path}.{changing[0]} ({name}) changes the width or the resolution of the stream, expected blocks that "
            "keep both, except for the first ones of a container; a StepsNet can only stand between two such changes"
        )
    if type(blocks[-1]).__module__.startswith("transformers."):
        return (
            f"{path} holds {len(blocks)} layers of transformers ({name}), expected the model of transformers by "
            f"itself, not inside another; for such layers in a model of your own, {TEN_LINES % name}"
        )
    return (
        f"{path or 'the model'} holds {len(blocks)} blocks of {name}, which has no adapter, and {name}({width}) is "
        f"not the same block: its constructor takes more than the width, it holds something that cannot be compared, "
        f"such as a tensor that is not a parameter, or the width is not in dimension {dim}; "
        f"{TEN_LINES % name}, and dim= if needed, see docs/your-model.md"
    )
