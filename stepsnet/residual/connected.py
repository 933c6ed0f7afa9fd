"""Blocks joined by a design: a container in place of the ``nn.Sequential`` of a residual model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest
from ..plan import MOST_BLOCKS, MOST_CHANNELS, Profile
from ..steps import StepsNet, StreamBlock, check_stream, recomputed
from .branches import BoundBranch, BranchParts, SilentBranch, parts_of
from .design import Connection, Place, State, Wiring, check_options
from .table import DESIGNS

__all__ = ["ConnectedBlock", "ConnectedSequence", "PassingBlock", "connect", "design_of", "wire"]


def connect(
    blocks: Iterable[nn.Module],
    design: str = "plain",
    *,
    width: int | None = None,
    first: int = 1,
    num_blocks: int | None = None,
    **options: Any,
) -> nn.Sequential | ConnectedSequence:
    """Residual blocks in a design, in place of the ``nn.Sequential`` that holds them.

    ``model.blocks = stepsnet.residual.connect(model.blocks, "mhc", streams=4)``. The blocks are taken over as they
    are: their weights keep their names, and those of the design stand beside them in ``connections``. Only "plain"
    leaves an ``nn.Sequential``.

    Args:
        design: a key of ``stepsnet.residual.DESIGNS``.
        width: C; by default that of the blocks' first norm.
        first: the number of the first block in the model, counted from 1, where the blocks are a part of it.
        num_blocks: blocks of the whole model.
        **options: those of the design.

    Shape: (B, N, C) -> (B, N, C); images as (B, H, W, C).

    Raises:
        UserError: an unknown design or option, a stream that the design is not for, a block whose branches are not
            declared.
    """
    members = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    if not isinstance(blocks, Iterable) or not all(isinstance(block, nn.Module) for block in members):
        raise UserError(
            f"residual: got {type(blocks).__name__}, expected the blocks of a model, such as its Sequential"
        )
    if design_of(design) is None:
        check_options(design, _Plain, options)
        return nn.Sequential(*members)
    wiring = wire(members, design, options, width=width, first=first, num_blocks=num_blocks)
    return ConnectedSequence(members, wiring)


class _Plain(Connection):
    """Only its options, of which it has none."""


def design_of(name: str) -> type[Connection] | None:
    """The design of that name; None for "plain". Raises UserError for an unknown one, and names the nearest."""
    if isinstance(name, str) and name in get_args(Profile):
        wanted = f"stepsnet.stepify(model, profile={name!r}), or a model's widths= as stepsnet plan gives them"
        raise UserError(
            f"residual: got {name!r}, a profile of widths, which needs blocks of several: expected {wanted}"
        )
    if not isinstance(name, str) or name not in DESIGNS:
        raise UserError(f"residual: got {name!r}, expected one of {', '.join(DESIGNS)}{nearest(str(name), DESIGNS)}")
    return DESIGNS[name]


def wire(
    blocks: Sequence[nn.Module],
    name: str,
    options: Mapping[str, Any],
    *,
    width: int | None = None,
    first: int = 1,
    num_blocks: int | None = None,
) -> Wiring:
    """Give each block its connections, in place, and return the beginning and end of their stream.

    From then on the blocks take a state and return one, see :class:`ConnectedBlock`.

    Raises:
        UserError: as :func:`connect`.
    """
    design = design_of(name)
    assert design is not None
    _check_places(blocks, width, first, num_blocks)
    if not design.joins:
        raise UserError(f"residual: {name} takes the place of timm's Block, expected it as residual= of a Steps-DeiT")
    options = check_options(name, design, options)
    parts = [_parts_for(block, name, design) for block in blocks]
    per_block = [len(one) if design.unit == "branch" else 1 for one in parts]
    layers, total = sum(per_block), max(num_blocks or 0, first - 1 + len(blocks))
    width = _width_of(blocks, parts, width)
    design.check(width, layers, options)
    wiring = design.wiring(width, layers, options)
    layer = 1
    for number, (block, of_block, count) in enumerate(zip(blocks, parts, per_block), first):
        of_connections = [None] if design.unit == "block" else of_block[:count]
        places = [
            Place(
                width,
                layer + i,
                layers,
                number,
                total,
                one,
                block.get_submodule(one.norm) if one and one.norm else None,
            )
            for i, one in enumerate(of_connections)
        ]
        design.prepare(block, of_block, places[0], options)
        block.__class__ = _connected_class(type(block))  # type: ignore[arg-type]
        block.connections = nn.ModuleList(design(place, options) for place in places)
        # not as submodules: they belong to the container
        block.__dict__.update(wiring=wiring, unit=design.unit, branch_parts=tuple(of_block))
        layer += count
    return wiring


def _check_places(blocks: Sequence[nn.Module], width: Any, first: Any, num_blocks: Any) -> None:
    """Raises UserError for blocks that are shared, and for numbers that are no width or place of a block."""
    if len(set(blocks)) < len(blocks):
        raise UserError("residual: got one block at several places, expected blocks of their own")
    for key, value, most in (("width", width, MOST_CHANNELS), ("first", first, None), ("num_blocks", num_blocks, None)):
        if value is None and key != "first":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= (most or MOST_BLOCKS):
            raise UserError(f"residual: {key}: got {value!r}, expected 1 to {most or MOST_BLOCKS:,}")
    if num_blocks is not None and num_blocks < first - 1 + len(blocks):
        raise UserError(f"residual: num_blocks: got {num_blocks}, expected at least {first - 1 + len(blocks)}")


def _parts_for(block: nn.Module, name: str, design: type[Connection]) -> Sequence[BranchParts]:
    kind = type(block).__name__
    if isinstance(block, ConnectedBlock):
        raise UserError(f"residual: {kind} has a design already, expected blocks without one")
    if any(isinstance(module, nn.Conv2d) for module in block.modules()):
        raise UserError(f"residual: {kind} has convolutions over images (B, C, H, W), expected blocks of channels last")
    parts = parts_of(block)
    if parts is None and design.unit != "block":
        raise UserError(f"residual: {name} joins the branches of a block, and those of {kind} are not declared")
    for part in design.needs:
        if not any(getattr(one, part) for one in parts or ()):
            raise UserError(f"residual: {name} works on the {part} of a branch, which {kind} does not declare")
    design.check_block(block, parts or ())
    return parts or ()


def _width_of(blocks: Sequence[nn.Module], parts: Sequence[Sequence[BranchParts]], given: int | None) -> int:
    """By the norms in front of the branches, where they are declared; else what is given."""
    found: dict[int, int] = {}  # the first block of each width
    for number, (block, of_block) in enumerate(zip(blocks, parts), 1):
        for one in of_block:
            weight = getattr(block.get_submodule(one.norm), "weight", None) if one.norm else None
            if isinstance(weight, Tensor):
                found.setdefault(weight.shape[0], number)
    if len(found) > 1:
        places = ", ".join(f"{width} in block {number}" for width, number in found.items())
        raise UserError(f"residual: got blocks of several widths, {places}, expected one")
    if found and given not in (None, *found):
        raise UserError(f"residual: width: got {given}, but the blocks' norms have {next(iter(found))} channels")
    if given or found:
        return given or next(iter(found))
    raise UserError(f"residual: the width of {type(blocks[0]).__name__ if blocks else 'no block'} is not known: width=")


class ConnectedBlock:
    """A block that joins its branches to the stream by connections: state, … -> state.

    Each class of blocks has a subclass with this in front; the block's parts and their names stay.
    """

    connections: nn.ModuleList
    wiring: Wiring
    unit: Literal["branch", "block", "branches"]
    branch_parts: tuple[BranchParts, ...]
    block_class: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made for the block's, so that pickle and deepcopy have to make it too."""
        return _blank, (self.block_class,), self.__dict__

    def forward(self, state: State, *args: Any, **kwargs: Any) -> State:
        if self.unit == "block":
            whole: Callable[..., Tensor] = super().forward  # type: ignore[misc]
            return self.connections[0](state, lambda x: whole(x, *args, **kwargs))
        branches = [BoundBranch(self, parts, args, kwargs) for parts in self.branch_parts]  # type: ignore[arg-type]
        if self.unit == "branches":
            return self.connections[0](state, branches)
        for connection, branch in zip(self.connections, branches):
            state = connection(state, branch)
        return state

    def without_branches(self, state: State, *args: Any, **kwargs: Any) -> State:
        """As ``forward`` if all branches gave zero: what is left where a block is dropped."""
        if self.unit == "block":
            return self.connections[0](state, lambda x: x)
        if self.unit == "branches":
            return self.connections[0](state, [SilentBranch() for _ in self.branch_parts])
        for connection in self.connections:
            state = connection(state, SilentBranch())
        return state

    def parts_to_compile(self) -> list[nn.Module]:
        """Itself; where the state grows from block to block, its attention and its MLP, which see one shape."""
        module: Any = self
        if not self.wiring.grows:
            return [module]
        inside = [child for name, child in module.named_children() if name != "connections"]
        return [child for child in inside if next(child.children(), None) is not None]


@cache
def _connected_class(block_class: Any) -> Any:
    namespace = {"__module__": __name__, "block_class": block_class}
    return type(f"Connected{block_class.__name__}", (ConnectedBlock, block_class), namespace)


def _blank(block_class: Any) -> Any:
    """A connected block without its parts, which pickle adds."""
    made = _connected_class(block_class)
    return made.__new__(made)


class ConnectedSequence(StepsNet):
    """Connected blocks named 0, 1, 2, …, as in an ``nn.Sequential``, and their wiring: (B, N, C) -> (B, N, C).

    It has the length of its blocks and can be iterated and sliced as a :class:`stepsnet.StepsNet` of one step.
    """

    def __init__(self, blocks: Iterable[nn.Module], wiring: Wiring):
        nn.Module.__init__(self)
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)
        self.wiring = wiring
        self.width, self.widths, self.dim = wiring.width, (wiring.width,), -1
        self.grad_checkpointing = False

    @property
    def blocks(self) -> list[Any]:
        return [module for name, module in self._modules.items() if name != "wiring"]

    @property
    def networks(self) -> nn.ModuleList:  # type: ignore[override]
        """The one network of a StepsNet of one step; it shares the blocks."""
        return nn.ModuleList([nn.Sequential(*self.blocks)])

    def forward(self, x: Tensor) -> Tensor:
        check_stream(0, x.shape[-1], self.width)
        if not self.blocks:
            return x  # a step of which nothing is left, whose end could still weigh its one source
        state = self.wiring.start(x)
        for block in self.blocks:
            state = recomputed(block, state) if self.grad_checkpointing else block(state)
        return self.wiring.finish(state)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def blocks_per_step(self) -> list[int]:
        return [len(self.blocks)]

    def __iter__(self) -> Iterator[StreamBlock]:
        """The blocks as functions of the stream. They run in order: each goes on from the state of the one before."""
        passage = _Passage(self.wiring)
        for index, block in enumerate(self.blocks):
            run = PassingBlock(passage, block, index, self.grad_checkpointing)
            yield StreamBlock(run, self.width, self.width, -1)

    def _select(self, keep: Sequence[bool]) -> ConnectedSequence:
        kept = [block for block, chosen in zip(self.blocks, keep) if chosen]
        selected = ConnectedSequence(kept, self.wiring)
        selected.grad_checkpointing = self.grad_checkpointing
        return selected.train(self.training)

    def extra_repr(self) -> str:
        return ""


def _same(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; taken for granted where tensors have no values."""
    if x is other or x.is_meta or type(x) is not Tensor or torch.compiler.is_compiling():
        return True
    return x.shape == other.shape and torch.equal(x, other)


class _Passage:
    """One pass over the blocks of an iterated container."""

    def __init__(self, wiring: Wiring):
        self.wiring = wiring
        self.state: State = None
        self.shown: Tensor | None = None  # what the last block has returned
        self.begun: dict[int, tuple[Tensor, State]] = {}  # what each block began with, for one that is run again


class PassingBlock:
    """One block in a pass. ``block`` is the module, by which blocks.py finds it."""

    def __init__(self, passage: _Passage, block: nn.Module, index: int, checkpointed: bool):
        self.passage, self.block, self.index, self.checkpointed = passage, block, index, checkpointed

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        one = self.passage
        state = self._state_for(x)
        if torch.is_grad_enabled():  # timm may run the block again in the backward pass
            one.begun[self.index] = x, state
        run = partial(recomputed, self.block) if self.checkpointed else self.block
        one.state = run(state, *args, **kwargs)
        one.shown = one.wiring.finish(one.state)
        return one.shown

    def _state_for(self, x: Tensor) -> State:
        one = self.passage
        if self.index in one.begun and x is one.begun[self.index][0]:
            return one.begun[self.index][1]
        if self.index == 0 or one.shown is None:
            one.begun.clear()
            return one.wiring.start(x)
        if _same(x, one.shown):
            return one.state
        raise RuntimeError(
            f"block {self.index} of a connected sequence: got another tensor than the block before has returned; "
            "the stream of this design is more than that tensor, run the container or its blocks in order"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("block", "passage") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.block, name)
