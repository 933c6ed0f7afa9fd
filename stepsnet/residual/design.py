"""What a design of the residual stream is: how each branch is joined to the stream, and how a stream begins and ends.

A design is a subclass of :class:`Connection` in a file of its own and a line in ``table.py``. The symbols are those of
the papers: x_l is the stream in front of layer l, F_l a residual branch (attention, or MLP) with its norm, C the width,
L the number of branches of the stream, n a number of parallel streams. B is the batch and N the number of tokens.
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
# What a block hands to the next: the stream, or several tensors, of which the last is the one that the block has made
State = Any
Unit = Literal["branch", "block", "branches"]
UNITS: tuple[Unit, ...] = get_args(Unit)
NEEDS = ("norm", "linears", "values", "projections")  # what of a branch has to be declared


@dataclass(frozen=True)
class Place:
    """Where a connection stands; all are counted from 1.

    Args:
        width: C of its stream.
        layer: which connection of its stream, of ``layers``. A step of a StepsNet is a stream of its own.
        block: which block of the whole model, of ``blocks``.
        parts: those of its branch, or of the first of its branches; None where a block is joined as a whole.
        norm: the norm in front of that branch, where it is declared.
        inputs: what the last layer of that branch reads, where it is declared; else 0.
        heads: of an attention; else 0.
        attention: which branch of its stream that declares values; 0 of one that declares none.
        branches: those of the whole model, where all of its blocks have as many as the stream's have on average.
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
    """What has parameters of a design, and knows their start values."""

    def init_weights(self) -> None:
        """Set the start values; timm and transformers call it too when they initialize a model again."""

    def reset_parameters(self) -> None:
        """By this name timm, where weights were skipped, and torch's FSDP ask for it."""
        self.init_weights()


class Wiring(DesignPart):
    """How the stream of some blocks begins and ends. By default the state is the stream itself, (B, N, C).

    Args:
        width: C.
        layers: connections in the stream.
        options: those of the design.
    """

    grows = False  # whether the state holds more tensors after each block

    def __init__(self, width: int, layers: int, options: Mapping[str, Any]):
        super().__init__()
        self.width, self.layers, self.options = width, layers, dict(options)

    def start(self, x: Tensor) -> State:
        """(B, N, C) -> the state in front of the first block."""
        return x

    def finish(self, state: State) -> Tensor:
        """The state after any block -> what the head would read if the network ended there, (B, N, C)."""
        return state

    def end(self, state: State) -> Tensor:
        """Calls ``finish`` and checks what a user's design returns: raises UserError for several tensors, or none."""
        y = self.finish(state)
        if y is None or isinstance(y, tuple | list | dict):
            kind = type(y).__name__
            raise UserError(f"residual: a stream ended as {kind}, expected one tensor, which finish of a Wiring makes")
        return y

    def as_sum(self, state: State) -> Tensor:
        """What statistics of the stream are taken of: where ``finish`` gives a mean of what blocks wrote, their sum."""
        return self.finish(state)

    def gradient_of_stream(self, gradient: Tensor) -> Tensor:
        """The gradient of the state's last tensor -> that of a shift of the stream, (B, N, C)."""
        return gradient


class Connection(DesignPart):
    """How one branch F, or one block, is joined to the stream: state, F -> state.

    For the "branches" of a block together, F is a list of them.

    Args:
        place: where it stands.
        options: all options of the design, with their values.

    Class attributes:
        title: the design in a few words.
        source: the paper, and where in it.
        unit: what is joined: each residual "branch" of a block, the "block" as a whole, or all "branches" together.
        wiring: how the stream begins and ends.
        options: names and defaults; a value has to be of the default's type.
        needs: what has to be declared: "norm" and "linears" of every branch, "values" or "projections" of one.
        scales_branches: whether a scale of its own stands behind each branch, beside which LayerScale has no meaning.
        starts_as_plain: whether the network computes what the plain one does before it is trained, up to rounding.
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
        self.place = replace(place, norm=None)  # a design that takes the norm away would keep its weights here

    def forward(self, state: State, F: Any) -> State:
        raise NotImplementedError

    def init_branch(self, block: nn.Module, parts: BranchParts) -> None:
        """Set the start values of the branch's own layers, where the design's paper has other ones than the block."""

    @classmethod
    def check(cls, width: int, layers: int, options: Mapping[str, Any]) -> None:
        """Raise UserError for options that have no meaning for such a stream."""

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        """Raises UserError for a block that ``prepare`` cannot change; nothing has been changed then."""

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        """Where in a branch ``prepare`` puts hooks, of which a module that branches share would have those of all."""
        return []

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        """Change a block in place where the design changes what is inside of a branch, such as its norm."""

    @classmethod
    def traffic(cls, layers: int, options: Mapping[str, Any]) -> float | None:
        """Numbers that are read and written between the branches, per token and block of two branches, in units of C.

        Of a stream with so many connections, from its start to its end; where blocks differ, the mean. Each operand
        of a formula is read once and each result written once, as a fused kernel would: a norm behind a branch, a gain
        or a low-rank map on the way takes nothing more. What is inside of F counts nowhere, F's reading of its input
        neither. The plain stream reads x and F(x) and writes their sum, twice a block: 6. None, not known: a design
        with a Wiring that does not say.
        """
        return 6.0 if cls.wiring is Wiring else None


def check_design(name: str, design: Any) -> None:
    """Raise UserError for what is no design, or lacks what is shown of it."""
    if not isinstance(design, type) or not issubclass(design, Connection):
        raise UserError(f"residual: {name}: got {design!r}, expected a subclass of Connection")
    for key in ("title", "source"):
        text = getattr(design, key, None)
        if not isinstance(text, str) or not text:
            raise UserError(f"residual: {key} of {name}: got {text!r}, expected a text")
    if design.unit not in UNITS:
        raise UserError(f"residual: unit of {name}: got {design.unit!r}, expected {', '.join(UNITS)}")
    if not isinstance(design.needs, tuple) or not all(need in NEEDS for need in design.needs):
        raise UserError(f"residual: needs of {name}: got {design.needs!r}, expected a tuple of {', '.join(NEEDS)}")
    if not isinstance(design.wiring, type) or not issubclass(design.wiring, Wiring):
        raise UserError(f"residual: wiring of {name}: got {design.wiring!r}, expected a subclass of Wiring")
    if not isinstance(design.options, Mapping):
        raise UserError(f"residual: options of {name}: got {design.options!r}, expected names and their defaults")
    if design.forward is Connection.forward:
        raise UserError(f"residual: forward of {name}: got none of its own, expected (self, state, F)")
    try:
        inspect.signature(design.forward).bind("self", "state", "F")
    except TypeError:
        got = inspect.signature(design.forward)
        raise UserError(f"residual: forward of {name}: got {got}, expected (self, state, F)") from None


def check_options(name: str, design: type[Connection], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a design with its defaults. Raises UserError for an unknown one or a value of another type."""
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
    """Raise UserError where a block gets the outputs of fewer or of more blocks than stand before it."""
    if got != expected:
        raise UserError(
            f"residual: a block got {got} outputs of blocks before it, expected {expected}: its weights are for them; "
            "run the blocks from the first, without leaving one out"
        )


def precise(x: Tensor) -> Tensor:
    """In float32, or in float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor, without the import that would say so."""
    return hasattr(parameter, "device_mesh")


@torch.no_grad()
def set_start(parameter: Tensor, value: Tensor) -> None:
    """Initialize a parameter, alike on all ranks, unless transformers has loaded it already.

    The value is written whole: a view of a parameter that FSDP has sharded may be a view of a copy.
    """
    if getattr(parameter, "_is_hf_initialized", False):
        return
    value = value.to(parameter.device, parameter.dtype)
    if is_sharded(parameter):
        from torch.distributed.tensor import DTensor, distribute_tensor  # which takes a moment

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


@torch.no_grad()
def reset_norm(norm: Any) -> None:
    """The start of any norm: gains 1, biases 0, where it has them; Gemma's gains are 1 + its weight."""
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
    """For what is computed in float32 in any case; where a device has no autocast, there is nothing to switch off."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it, and would compile every pass anew
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def rms_norm(x: Tensor) -> Tensor:
    """x / RMS(x) over the last dimension, without a weight, in float32."""
    x = precise(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
