"""What a model does with its blocks in a forward pass without data, to find what it cannot do with them in steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["BlockUses", "has_shortcut", "reached"]

# the nodes of autograd's graph that multiply by a weight
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Linear", "MkldnnLinear", "Convolution")
# functions that read no values of a tensor
_NO_VALUES = ("__get__", "size", "dim", "ndimension", "numel", "stride", "is_floating_point", "__len__")
_SUMS = ("add", "add_", "__add__", "__radd__", "__iadd__")
# functions that give the values of a tensor in another shape, order, place or type; __get__ is for x.T and others
_SAME_VALUES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "__get__"),
    *("transpose", "swapaxes", "movedim", "t", "contiguous", "clone", "detach", "to", "type", "type_as"),
    *("float", "double", "half", "bfloat16", "roll", "flip", "pad"),
    *("__getitem__", "expand", "split", "chunk", "narrow"),
)


class BlockUses(TorchFunctionMode):
    """While active, notes what a model does with its blocks besides running them one after another.

    Attributes:
        written: blocks that write into their input, as ``x += F(x)`` does.
        summed: blocks whose input is added to their output outside of them.
        read: blocks whose output is read by something other than a block of the same container.
        beside: blocks that get the same input as another of their container, as experts do.
        changed: blocks after the first that get other values than a block of the same container has returned.
    """

    def __init__(self, containers: Mapping[str, Sequence[nn.Module]]):
        super().__init__()
        self.container_of = {block: path for path, blocks in containers.items() for block in blocks}
        self.written: set[nn.Module] = set()
        self.summed: set[nn.Module] = set()
        self.read: set[nn.Module] = set()
        self.beside: set[nn.Module] = set()
        self.changed: set[nn.Module] = set()
        self._firsts = {blocks[0] for blocks in containers.values()}
        self._inside: list[nn.Module] = []  # the blocks that are running
        self._taken: dict[nn.Module, Tensor] = {}
        self._versions: dict[nn.Module, int] = {}  # of the tensors in _taken, when they were taken
        self._returned: dict[int, tuple[Tensor, nn.Module]] = {}  # kept alive, so that no other gets the id
        self._streams: dict[int, tuple[Tensor, nn.Module, int]] = {}  # these and any of the same values, with versions
        self._hooks = ExitStack()

    def __enter__(self) -> BlockUses:
        for block in self.container_of:
            self._hooks.callback(block.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            self._hooks.callback(block.register_forward_hook(self._end).remove)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = tree_leaves((args, kwargs or {}))
        for tensor in given:
            block = self._block_of(tensor)
            if block is not None and name not in _NO_VALUES:
                self.note_read(tensor)
                if name in _SUMS and any(other is self._taken.get(block) for other in given):
                    self.summed.add(block)
        result = func(*args, **(kwargs or {}))
        block = self._source_of(args[0]) if name in _SAME_VALUES and args else None
        if block is not None:
            for same in tree_leaves(result):
                if isinstance(same, Tensor):
                    self._streams[id(same)] = same, block, same._version
        return result

    def _source_of(self, tensor: Any) -> nn.Module | None:
        """The block whose output has the same values as the tensor, if there is one."""
        found = self._streams.get(id(tensor))
        return found[1] if found is not None and found[2] == tensor._version else None

    def note_read(self, tensors: Any) -> None:
        """Note as read the blocks that returned these tensors, unless it is a block of their container that reads."""
        for tensor in tree_leaves(tensors):
            block = self._block_of(tensor)
            if block is not None:
                own = self.container_of[block]
                if not any(self.container_of[other] == own for other in self._inside):
                    self.read.add(block)

    def _block_of(self, tensor: Any) -> nn.Module | None:
        return self._returned[id(tensor)][1] if isinstance(tensor, Tensor) and id(tensor) in self._returned else None

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._inside.append(block)
        if args and isinstance(args[0], Tensor):
            own = self.container_of[block]
            if block not in self._firsts:
                source = self._source_of(args[0])
                if source is None or self.container_of[source] != own:
                    self.changed.add(block)
            has_passed = self._block_of(args[0]) is not None  # through a block that returned it unchanged
            for other, taken in self._taken.items():
                if taken is args[0] and other is not block and self.container_of[other] == own and not has_passed:
                    self.beside.add(block)
            self._taken[block], self._versions[block] = args[0], args[0]._version

    def _end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside.pop()
        if block in self._taken and self._taken[block]._version != self._versions[block]:
            self.written.add(block)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._returned[id(tensor)] = (tensor, block)
                self._streams[id(tensor)] = (tensor, block, tensor._version)


def reached(model: nn.Module, outputs: Any) -> set[Tensor]:
    """Those parameters that take a gradient and that the outputs of a model depend on."""
    return {*_leaves(outputs)}.intersection(model.parameters())


def has_shortcut(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a path without products by weights leads from a block's first argument to its output, as in x + F(x).

    Norms may be on the path, as in blocks that end in one. The block has to come from :func:`stepsnet.macs.on_meta`.
    """
    x = args[0].detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = block(x, *args[1:], **kwargs)
    return any(leaf is x for leaf in _leaves(outputs, _PRODUCTS))


def _leaves(outputs: Any, stops: tuple[str, ...] = ()) -> Iterator[Tensor]:
    """The leaves of autograd's graph behind outputs, on paths without nodes whose names begin with one of ``stops``."""
    tensors = [tensor for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor)]
    yield from (tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad)
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        if node.name().startswith(stops):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
