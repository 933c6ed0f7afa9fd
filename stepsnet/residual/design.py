"""What a design of the residual stream is: how each branch is joined to the stream, and how a stream begins and ends.

A design is a subclass of :class:`Connection` in a file of its own and a line in ``table.py``. The symbols are those of
the papers: x_l is the stream before layer l, F_l a residual branch (attention or MLP) with its norm, C the width, L the
number of branches of the stream, n the number of parallel streams. B is the batch and N the number of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest
from .branches import BoundBranch, BranchParts

__all__ = [
    "Branch",
    "Connection",
    "DesignPart",
    "Place",
    "State",
    "Unit",
    "Wiring",
    "check_bounds",
    "check_design",
    "check_options",
    "check_sources",
    "is_sharded",
    "precise",
    "reset_norm",
    "rms_norm",
    "set_start",
    "without_autocast",
]

Branch = BoundBranch  # F: (B, N, C) -> (B, N, C); a block as a whole is a plain function
# What a block passes to the next: the stream, or several tensors, the last of which is the one that the block made
State = Any
Unit = Literal["branch", "block", "branches"]
UNITS: tuple[Unit, ...] = get_args(Unit)
NEEDS = ("norm", "linears", "values", "projections")  # what a design may need a branch to declare


@dataclass(frozen=True)
class Place:
    """Where a connection is in its stream and in the model. All positions are counted from 1.

    Args:
        width: C of its stream.
        layer: the position of the connection in its stream, out of ``layers``. Each step of a StepsNet is its own
            stream.
        block: the position of its block in the whole model, out of ``blocks``.
        parts: the parts of its branch, or of the first of its branches; None if a block is joined as a whole.
        norm: the norm in front of that branch, if it is declared.
        inputs: the width of what the last layer of that branch reads, if that layer is declared; else 0.
        heads: the number of heads of an attention; else 0.
        attention: the position of the branch among those of its stream that declare values; 0 if it declares none.
        branches: the number of branches of the whole model, if its blocks have as many on average as the stream's.
    """

    width: int
    layer: int
    layers: int
    block: int
    blocks: int
    parts: BranchParts | None = None
    norm: nn.Module | None = None
    inputs: int = 0
    heads: int = 0
    attention: int = 0
    branches: int = 1


class DesignPart(nn.Module):
    """A module that holds parameters of a design and sets their start values."""

    def init_weights(self) -> None:
        """Set the start values. timm and transformers also call this when they initialize a model again."""

    def reset_parameters(self) -> None:
        """Call :meth:`init_weights`: torch's FSDP uses this name, and so does timm if initialization was skipped."""
        self.init_weights()


class Wiring(DesignPart):
    """How the stream of a sequence of blocks begins and ends. By default the state is the stream itself, (B, N, C).

    Args:
        width: C.
        layers: the number of connections in the stream.
        options: all options of the design, with their values.
    """

    grows = False  # whether the state holds more tensors after each block

    def __init__(self, width: int, layers: int, options: Mapping[str, Any]):
        super().__init__()
        self.width, self.layers, self.options = width, layers, dict(options)

    def start(self, x: Tensor) -> State:
        """(B, N, C) -> the state before the first block."""
        return x

    def finish(self, state: State) -> Tensor:
        """The state after any block -> what the head would read if the network ended there, (B, N, C)."""
        return state

    def end(self, state: State) -> Tensor:
        """Call ``finish``. Raise UserError if it returns several tensors or none, as a user's design may."""
        y = self.finish(state)
        if y is None or isinstance(y, tuple | list | dict):
            kind = type(y).__name__
            raise UserError(f"residual: finish of the design's Wiring returned {kind}, expected one tensor, the stream")
        return y

    def may_be(self, state: Tensor) -> bool:
        """Whether a tensor may be a state, and is not the stream as the blocks' old container passes it."""
        return not self.grows

    def as_sum(self, state: State) -> Tensor:
        """The stream for statistics: as ``finish`` returns it or, if that is a mean of what blocks wrote, their sum."""
        return self.finish(state)

    def gradient_of_stream(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to the state's last tensor -> with respect to a shift of the stream, (B, N, C)."""
        return gradient


class Connection(DesignPart):
    """How one branch F, or one block, is joined to the stream: state, F -> state.

    If the unit is "branches", F is the list of a block's branches.

    Args:
        place: where the connection is.
        options: all options of the design, with their values.

    Class attributes:
        title: the design in a few words.
        source: the paper, and where in it.
        unit: what is joined: each residual "branch" of a block, the "block" as a whole, or all "branches" together.
        wiring: how the stream begins and ends.
        options: names and defaults; a value has to have the type of its default.
        needs: what has to be declared: "norm" and "linears" for every branch, "values" or "projections" for one.
        scales_branches: whether the design scales each branch itself, so that a LayerScale in the block makes no sense.
        starts_as_plain: whether the untrained network computes what the plain one does, up to rounding.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    unit: ClassVar[Unit] = "branch"
    wiring: ClassVar[type[Wiring]] = Wiring
    options: ClassVar[dict[str, Any]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    scales_branches: ClassVar[bool] = False
    starts_as_plain: ClassVar[bool] = False

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__()
        self.place = replace(place, norm=None)  # a design that removes the norm would keep its weights here

    def forward(self, state: State, F: Any) -> State:
        raise NotImplementedError

    def init_branch(self, block: nn.Module, parts: BranchParts) -> None:
        """Set the start values of the branch's own layers, if the design's paper prescribes others than the block's."""

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        """Raise UserError for options that make no sense for such a stream."""

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        """Raise UserError for a block that ``prepare`` cannot change. This is called before anything is changed."""

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        """The paths in a branch where ``prepare`` puts hooks. A module that branches share would get those of all."""
        return []

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        """Change a block in place, for designs that change something inside a branch, such as its norm."""

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float | None:
        """Numbers read and written between the branches, per token and block of two branches, in units of C.

        They are counted from the start to the end of a stream of ``layers`` connections; if blocks differ, the result
        is their mean. Each operand of a formula is read once and each result is written once, as a fused kernel would
        do it: a norm behind a branch, a gain or a low-rank map on the way adds nothing. What happens inside F is not
        counted, nor is F's reading of its input. The plain stream reads x and F(x) and writes their sum, twice per
        block: 6. None means unknown: the design has a Wiring of its own and does not define this.
        """
        return 6.0 if cls.wiring is Wiring else None


def check_design(name: str, design: Any) -> None:
    """Raise UserError for something that is not a design, or a design whose attributes are missing or invalid."""
    if not isinstance(design, type) or not issubclass(design, Connection):
        raise UserError(f"residual: {name}: got {design!r}, expected a subclass of Connection")
    for key in ("title", "source"):
        text = getattr(design, key, None)
        if not isinstance(text, str) or not text:
            raise UserError(f"residual: {key} of {name}: got {text!r}, expected some text")
    if design.unit not in UNITS:
        raise UserError(f"residual: unit of {name}: got {design.unit!r}, expected {', '.join(UNITS)}")
    if not isinstance(design.needs, tuple) or not all(need in NEEDS for need in design.needs):
        raise UserError(
            f"residual: needs of {name}: got {design.needs!r}, expected a tuple of names from {', '.join(NEEDS)}"
        )
    if not isinstance(design.wiring, type) or not issubclass(design.wiring, Wiring):
        raise UserError(f"residual: wiring of {name}: got {design.wiring!r}, expected a subclass of Wiring")
    if not isinstance(design.options, Mapping):
        raise UserError(f"residual: options of {name}: got {design.options!r}, expected a mapping of names to defaults")
    if design.forward is Connection.forward:
        raise UserError(f"residual: forward of {name}: got none of its own, expected (self, state, F)")
    try:
        inspect.signature(design.forward).bind("self", "state", "F")
    except TypeError:
        got = inspect.signature(design.forward)
        raise UserError(f"residual: forward of {name}: got {got}, expected (self, state, F)") from None


def check_options(name: str, design: type[Connection], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a design's default options. Raise UserError for an unknown option or a value of the wrong type."""
    if not isinstance(given, Mapping):
        raise UserError(f"residual_options: got {given!r}, expected a mapping such as {{'streams': 4}}")
    for key, value in given.items():
        if key not in design.options:
            known = ", ".join(design.options) or "none"
            raise UserError(f"residual: {name} got the option {key!r}, expected {known}{nearest(key, design.options)}")
        kind = type(design.options[key])
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or isinstance(value, bool) is not (kind is bool):
            raise UserError(f"residual: {key} of {name}: got {value!r}, expected a value such as {design.options[key]}")
    return {**design.options, **given}


def check_bounds(name: str, options: Mapping[str, Any], **bounds: tuple[float, float]) -> None:
    """Raise UserError for an option below its least or above its largest value."""
    for key, (least, most) in bounds.items():
        if not least <= options[key] <= most:
            raise UserError(f"residual: {key} of {name}: got {options[key]}, expected {least:,g} to {most:,g}")


def check_sources(got: int, expected: int) -> None:
    """Raise UserError if a block gets the outputs of fewer or more blocks than come before it."""
    if got != expected:
        raise UserError(
            f"residual: a block got {got} outputs of earlier blocks, expected {expected}, for which it has weights: "
            "run the blocks in order from the first, without leaving any out"
        )


def precise(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor, without importing that class."""
    return hasattr(parameter, "device_mesh")


@torch.no_grad()
def set_start(parameter: Tensor, value: Tensor) -> None:
    """Initialize a parameter, alike on all ranks, unless transformers has already loaded it.

    The value is written as a whole: a view of a parameter that FSDP has sharded may be a view of a copy.
    """
    if getattr(parameter, "_is_hf_initialized", False):
        return
    value = value.to(parameter.device, parameter.dtype)
    if is_sharded(parameter):
        from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


@torch.no_grad()
def reset_norm(norm: Any) -> None:
    """Initialize any norm: gains to 1 and biases to 0, if it has them. Gemma's gains are 1 + its weight."""
    if getattr(norm, "bias", None) is not None:
        nn.init.zeros_(norm.bias)
    if getattr(norm, "weight", None) is not None:
        nn.init.ones_(norm.weight)
        of_torch = type(norm).__module__.startswith("torch.")
        if (
            not (norm.weight.is_meta or of_torch)
            and norm(torch.linspace(-3, 5, len(norm.weight)).to(norm.weight)).square().mean() > 2
        ):
            nn.init.zeros_(norm.weight)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context for what is always computed in float32. On a device without autocast it does nothing."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it, and would recompile in every pass
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def rms_norm(x: Tensor) -> Tensor:
    """x / RMS(x) over the last dimension, without a weight, in float32."""
    x = precise(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
