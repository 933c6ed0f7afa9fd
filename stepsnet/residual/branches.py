"""A residual branch of a block and its parts, which designs work on; known_blocks.py says which blocks have which."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

__all__ = ["BoundBranch", "BranchParts", "Projection", "SilentBranch", "check_in_place", "check_no_replica", "through"]


Projection = tuple[str, int, int]  # path of a linear layer, which part of its output, out of how many equal ones
_A_PROJECTION = '(path of a layer, index of the part of its output, number of parts), such as ("attn.qkv", 0, 3)'


@dataclass(frozen=True)
class BranchParts:
    """A branch F(x) = after(layer(norm(x))), given by the paths of its parts in the block.

    Args:
        norm: the norm in front; "" if it is not declared.
        layer: the attention or the MLP; if it returns a tuple, the first entry is the output.
        after: what follows it, such as layer scale and stochastic depth: modules, factors (parameters or numbers) or
            None.
        takes_arguments: whether ``layer`` takes the block's other arguments: masks, positions, a cache.
        projections: for an attention, the linear layers that make its queries, keys and values, in this order, each
            with the part of the layer's output that it is: 2, 3 for the last of three. None for other branches. The
            number of heads is read from ``layer``, from its attribute ``num_heads`` or else ``head_dim``.
        hidden: for an MLP, the linear layers before the last, in the form of ``projections``; if there are several,
            all but the last of them are gates. Empty if they are not known.
        last: the linear layer that makes the output.
        function: (block, x, …) -> the input of ``after``, in place of ``layer(norm(x))``; ``norm`` then names the norm
            that it goes through, for the designs that work on it.

    Raises:
        UserError: a part is of the wrong type.
    """

    norm: str = ""
    layer: str = ""
    after: tuple[str, ...] = ()
    takes_arguments: bool = False
    projections: tuple[Projection, Projection, Projection] | None = None
    hidden: tuple[Projection, ...] = ()
    last: str = ""
    function: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        for key in ("norm", "layer", "last"):
            if not isinstance(path := getattr(self, key), str):
                raise UserError(f"residual: BranchParts: {key}: got {path!r}, expected a path in the block")
        if not isinstance(self.after, tuple | list) or not all(isinstance(path, str) for path in self.after):
            raise UserError(f"residual: BranchParts: after: got {self.after!r}, expected a tuple of paths in the block")
        if self.function is not None and not callable(self.function):
            raise UserError(
                f"residual: BranchParts: function: got {self.function!r}, expected a function (block, x, …) -> F(x)"
            )
        three = self.projections
        if three is not None and (not _are_projections(three) or len(three) != 3):
            raise UserError(f"residual: BranchParts: projections: got {three!r}, expected three tuples {_A_PROJECTION}")
        if not _are_projections(self.hidden):
            raise UserError(f"residual: BranchParts: hidden: got {self.hidden!r}, expected tuples {_A_PROJECTION}")

    @property
    def values(self) -> Projection | None:
        return None if self.projections is None else self.projections[2]

    @property
    def linears(self) -> bool:
        """Whether all linear layers of the branch are declared."""
        return bool(self.last and (self.projections or self.hidden))


def _are_projections(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(
        isinstance(one, tuple | list)
        and [type(of) for of in one] == [str, int, int]
        and one[0] != ""
        and 0 <= one[1] < one[2]
        for one in given
    )


class BoundBranch:
    """F of one block in one call: x -> F(x), both (B, N, C)."""

    __slots__ = ("args", "block", "kwargs", "parts")

    def __init__(self, block: nn.Module, parts: BranchParts, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.parts, self.args, self.kwargs = block, parts, args, kwargs

    def __call__(self, x: Tensor, behind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return F(x), with ``behind`` applied between the layer and what follows it."""
        if self.parts.function is None:
            y = self._of_layer(self.block.get_submodule(self.parts.norm)(x) if self.parts.norm else x)
        else:
            try:
                y = self.parts.function(self.block, x, *self.args, **self.kwargs)
            except TypeError:
                self._check_takes(self.parts.function, x)
                raise
        return self._after(y if behind is None else behind(y))

    def _check_takes(self, function: Callable[..., Tensor], x: Tensor) -> None:
        """Raise UserError if a declared function does not take what its block was called with, such as a mask."""
        try:
            inspect.signature(function).bind(self.block, x, *self.args, **self.kwargs)
        except TypeError as error:
            what = ", ".join(self.kwargs) or f"{len(self.args)} positional argument(s) besides the stream"
            kind = getattr(self.block, "block_class", type(self.block)).__name__
            raise UserError(
                f"residual: {kind} got {what}, which a function declared for its branches does not take, "
                "expected a function of all arguments that the block takes"
            ) from error

    def attend(self, x_q: Tensor, x_k: Tensor, x_v: Tensor) -> Tensor:
        """F of an attention with separate inputs for queries, keys and values, each of which goes through the norm.

        The block must have been prepared by :func:`stepsnet.residual.separate_inputs.separate`.
        """
        norm = self.block.get_submodule(self.parts.norm)
        inputs = norm(x_q), norm(x_k), norm(x_v)
        of_layers: dict[Any, dict[int, Tensor]] = {}  # LinearOfSeveral -> its inputs, by part of its output
        for (path, part, _), x in zip(self.parts.projections or (), inputs):
            layer: Any = self.block.get_submodule(path)
            if not hasattr(layer, "inputs"):
                raise UserError(_was_replaced(self.block, path, layer))
            of_layers.setdefault(layer, {})[part] = x
        try:
            for layer, own in of_layers.items():
                layer.inputs = tuple(own[part] for part in sorted(own))
            return self._after(self._of_layer(inputs[0]))
        finally:  # a checkpoint aborts a pass that it recomputes once it has what it needs
            for layer in of_layers:
                layer.inputs = None

    def _of_layer(self, y: Tensor) -> Tensor:
        layer = attrgetter(self.parts.layer)(self.block)
        return through(layer, y, *self.args, **self.kwargs) if self.parts.takes_arguments else through(layer, y)

    def _after(self, y: Tensor) -> Tensor:
        for path in self.parts.after:
            y = through(attrgetter(path)(self.block), y)
        return y


def check_in_place(block: nn.Module, path: str, layer: Any) -> None:
    """Raise UserError if the layer that a design works on has been replaced by another one."""
    check_no_replica(layer)
    if (now := attrgetter(path)(block)) is not layer:
        raise UserError(_was_replaced(block, path, now))


def check_no_replica(layer: Any) -> None:
    """Raise UserError in ``torch.nn.DataParallel``, whose replicas have the hooks of the block on the first GPU."""
    if getattr(layer, "_is_replica", False):
        raise UserError(
            "residual: got a replica made by torch.nn.DataParallel, which this design's hooks do not reach, expected "
            "DistributedDataParallel (under torchrun) or a single visible GPU"
        )


def _was_replaced(block: nn.Module, path: str, layer: Any) -> str:
    """The error message for a layer that took the place of one that a design works on."""
    return (
        f"residual: {path} of {type(block).__name__}: got {type(layer).__name__} in place of the layer that the design "
        "works on, as with PEFT's adapters; expected the layer itself"
    )


def through(part: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply one part of a branch to x: a module, a factor (parameter or number), or None, which leaves x as it is."""
    if part is None:
        return x
    if isinstance(part, Tensor | int | float):
        return part * x
    y = part(x, *args, **kwargs)
    return y[0] if isinstance(y, tuple) else y  # transformers' attention returns its weights too


class SilentBranch:
    """F of a block that is left out: x -> 0."""

    def __call__(self, x: Tensor, behind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return torch.zeros_like(x)

    def attend(self, x_q: Tensor, x_k: Tensor, x_v: Tensor) -> Tensor:
        return torch.zeros_like(x_q)
