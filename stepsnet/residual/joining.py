"""``connect``: join existing blocks by a design, in one stream or in each step of a StepsNet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from operator import attrgetter
from typing import Any, TypeVar, get_args

from torch import Tensor, nn

from ..errors import UserError, nearest
from ..plan import MOST_BLOCKS, MOST_CHANNELS, Profile
from ..steps import StepsNet, is_plain_sequence
from ..stream import module_of
from .branches import BranchParts
from .channels import check_channels
from .connected import ConnectedBlock, ConnectedSequence, connected_class, has_design
from .design import Connection, Place, Wiring, check_design, check_options
from .known_blocks import check_declared, name_of, parts_of, undeclared
from .linears import heads_of, inputs_of_last, misses_linear
from .table import DESIGNS

__all__ = ["check_channels_last", "check_named", "connect", "connect_steps", "design_of", "wire_steps"]

_Container = TypeVar("_Container", bound=nn.Module)


def connect(
    blocks: Iterable[nn.Module],
    design: str = "plain",
    *,
    width: int | None = None,
    first: int = 1,
    num_blocks: int | None = None,
    **options: Any,
) -> nn.Sequential | StepsNet:
    """Join residual blocks by a design, in place of the ``nn.Sequential`` that holds them.

    ``model.blocks = stepsnet.residual.connect(model.blocks, "mhc", streams=4)``. The design uses the blocks themselves,
    not copies, so the given container can no longer be run by itself: pass ``copy.deepcopy(model.blocks)`` to keep a
    plain network. Their weights keep their names; those of the design are beside them, in ``connections``. "fixup",
    "deepnorm" and "rezero" also prescribe start values: they draw the blocks' linear layers anew, so trained weights
    are lost. Only "plain" returns an ``nn.Sequential``.

    Args:
        blocks: blocks of one width, or a StepsNet, each step of which is then a stream of its own.
        design: a key of ``stepsnet.residual.DESIGNS``.
        width: C; by default that of the norms in front of the blocks' declared branches, or of the steps.
        first: the number of the first block in the model, counted from 1, if the blocks are only a part of it.
        num_blocks: the number of blocks in the whole model.
        **options: the options of the design.

    Shape: (B, N, C) -> (B, N, C); images as (B, H, W, C).

    Raises:
        UserError: an unknown design or option, a stream that the design does not support, or a block whose branches are
            not declared. Nothing has been changed in these cases.
    """
    members = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    if isinstance(blocks, StepsNet) and not isinstance(blocks, ConnectedSequence):
        if has_design(blocks):
            raise UserError("residual: the steps have a design already, expected a StepsNet without one")
        if width is not None:
            raise UserError(f"residual: width: got {width} for a StepsNet, expected none: its steps have their own")
        return connect_steps(blocks, design, options, first, num_blocks)
    if any(isinstance(module_of(block), ConnectedBlock) for block in members):
        raise UserError("residual: the stream of these blocks has a design already, expected blocks without one")
    if not isinstance(blocks, Iterable) or not all(isinstance(block, nn.Module) for block in members):
        got = type(blocks).__name__
        raise UserError(f"residual: got {got}, expected the blocks of a model, such as its Sequential")
    if idle := [
        block for block in members if type(block).forward is nn.Module.forward and "forward" not in vars(block)
    ]:
        raise UserError(
            f"residual: got a {type(idle[0]).__name__} among the blocks, which has no forward pass, expected blocks "
            "that return x + F(x)"
        )
    if not members and design_of(design) is not None:
        raise UserError(f"residual: got {type(blocks).__name__} without blocks, expected at least one")
    wirings = wire_steps([members], [width], design, options, first, num_blocks)
    joined = nn.Sequential(*members) if wirings is None else ConnectedSequence(members, wirings[0])
    return _in_mode_of(blocks, members, joined)


def _in_mode_of(given: Any, members: Sequence[nn.Module], connected: _Container) -> _Container:
    """Set the mode of a new container alone, not of its blocks, to that of the container or list that it replaces.

    It is in training mode only if one of its blocks is, since a slice of an ``nn.Sequential`` always is, even if its
    blocks and the whole are not.
    """
    connected.training = getattr(given, "training", True) and any(block.training for block in members)
    return connected


@singledispatch
def connect_steps(
    container: StepsNet, design: str, options: Mapping[str, Any], first: int = 1, num_blocks: int | None = None
) -> StepsNet:
    """Join the blocks of each step of a StepsNet by a design. A container with names of its own keeps them."""
    check_channels_last(container, design)
    if any(isinstance(network, StepsNet) for network in container.networks):
        raise UserError(f"residual: {design}: got a StepsNet within a StepsNet, expected steps that hold blocks")
    steps = [list(n) if is_plain_sequence(n) else [n] for n in container.networks]  # type: ignore[call-overload]
    shared = set(container.modules())  # these keep their mode
    wirings = wire_steps(steps, container.widths, design, options, first, num_blocks)
    if wirings is None:
        return container
    networks = [ConnectedSequence(blocks, wiring) for blocks, wiring in zip(steps, wirings)]
    connected = type(container)(networks, container.widths, container.dim)
    connected.set_grad_checkpointing(container.grad_checkpointing)
    for module in set(connected.modules()) - shared:
        module.training = container.training
    return connected


def check_channels_last(container: StepsNet, design: str) -> None:
    """Raise UserError for a design of a StepsNet whose channels are not in the last dimension."""
    if container.dim != -1 and design_of(design) is not None:
        raise UserError(f"residual: got blocks with channels in dimension {container.dim}, expected channels last (-1)")


def wire_steps(
    steps: Sequence[Sequence[nn.Module]],
    widths: Sequence[int | None],
    name: str,
    options: Mapping[str, Any],
    first: int = 1,
    num_blocks: int | None = None,
) -> list[Wiring] | None:
    """Give each block its connections, in place, and return the wiring of each step's stream.

    From then on, the blocks take a state and return one, see :class:`ConnectedBlock`. "plain" changes no block and
    returns None.

    Args:
        widths: the width of each step; None for that of the norms in front of the blocks' branches.

    Raises:
        UserError: as :func:`connect`. No block has been changed then.
    """
    design = design_of(name)
    if design is None:
        check_options(name, _Plain, options)
        return None
    every = [block for blocks in steps for block in blocks]
    _check_places(every, widths, first, num_blocks)
    total = num_blocks or first - 1 + len(every)
    streams = []
    for blocks, width in zip(steps, widths):
        streams.append(_checked(blocks, name, design, options, width, first, total))
        first += len(blocks)
    _check_unshared(name, streams)
    made = [_make(stream) for stream in streams]
    return [_join(stream, parts) for stream, parts in zip(streams, made)]


@dataclass(frozen=True)
class _Stream:
    """Blocks that fit their design.

    Args:
        parts: the parts of each block's branches.
        first: the number of the first block, of ``total`` in the model.
    """

    blocks: Sequence[nn.Module]
    design: type[Connection]
    options: Mapping[str, Any]
    parts: Sequence[Sequence[BranchParts]]
    width: int
    first: int
    total: int

    @property
    def connections(self) -> list[int]:
        """The number of connections of each block."""
        return [len(one) if self.design.unit == "branch" else 1 for one in self.parts]


def _checked(
    blocks: Sequence[nn.Module],
    name: str,
    design: type[Connection],
    options: Mapping[str, Any],
    width: int | None,
    first: int,
    total: int,
) -> _Stream:
    options = check_options(name, design, options)
    parts = [_parts_for(block, name, design, width) for block in blocks]
    for block in {type(block): block for block in blocks}.values():
        check_declared(block, may_call_block=False)
    stream = _Stream(blocks, design, options, parts, _width_of(blocks, parts, width), first, total)
    design.check(stream.width, sum(stream.connections), options)
    return stream


def _check_unshared(name: str, streams: Sequence[_Stream]) -> None:
    """Raise UserError if several branches share a part that the design hooks: it would run the hooks of all of them."""
    places: dict[nn.Module, str] = {}
    for stream in streams:
        for number, (block, branches) in enumerate(zip(stream.blocks, stream.parts), stream.first):
            for index, parts in enumerate(branches, 1):
                for path in stream.design.hooked(parts):
                    here = f"{path} of branch {index} of block {number}"
                    if (there := places.setdefault(block.get_submodule(path), here)) != here:
                        raise UserError(
                            f"residual: {name} works on {here}, which is also {there}, expected a separate one for "
                            "each branch"
                        )


@dataclass(frozen=True)
class _Made:
    """The parts of a design for a stream: its wiring and, for each block, its first place and its connections."""

    wiring: Wiring
    places: list[Place]
    connections: list[nn.ModuleList]


def _make(stream: _Stream) -> _Made:
    """Make a design's parts before any block is changed: if a user's design fails here, the blocks stay as they are."""
    design, options, layers = stream.design, stream.options, sum(stream.connections)
    wiring = design.wiring if stream.blocks else Wiring  # nothing would train the design's in a step without blocks
    made = _Made(wiring(stream.width, layers, options), [], [])
    branches = round(stream.total * sum(map(len, stream.parts)) / max(1, len(stream.blocks)))
    layer, attentions = 1, 0
    for number, (block, parts, count) in enumerate(zip(stream.blocks, stream.parts, stream.connections), stream.first):
        of_connections = [None] if design.unit == "block" else parts[:count]
        places = []
        for i, one in enumerate(of_connections):
            place = Place(stream.width, layer + i, layers, number, stream.total, branches=branches)
            if one is not None and one.values:
                attentions += 1
                place = replace(place, attention=attentions)
            places.append(replace(place, **_branch_at(block, one)))
        made.places.append(places[0])
        made.connections.append(_like(block, nn.ModuleList(design(place, options) for place in places)))
        layer += count
    return made


def _join(stream: _Stream, made: _Made) -> Wiring:
    try:
        for block, parts, place, connections in zip(stream.blocks, stream.parts, made.places, made.connections):
            _join_block(block, stream, parts, place, connections, made.wiring)
    except Exception as error:  # raised by a user's design: ours refuse earlier
        error.add_note("the blocks may be partly joined: build them anew")
        raise
    return _like(stream.blocks[0], made.wiring) if stream.blocks else made.wiring


def _join_block(
    block: Any, stream: _Stream, parts: Sequence[BranchParts], place: Place, connections: nn.ModuleList, wiring: Wiring
) -> None:
    before = set(block.modules())
    stream.design.prepare(block, parts, place, stream.options)
    for module in set(block.modules()) - before:
        module.training = block.training
    block.__class__ = connected_class(type(block))  # type: ignore[arg-type]
    block.connections = connections
    # not as a submodule: the wiring belongs to the container
    block.__dict__.update(wiring=wiring, unit=stream.design.unit, branch_parts=tuple(parts))
    for parameter in block.parameters():  # transformers marks what it has loaded; here it is drawn anew
        parameter.__dict__.pop("_is_hf_initialized", None)
    block.init_branches()


def _like(block: nn.Module, made: Any) -> Any:
    """Move parts of a design to the block's device and precision, and set them to its mode."""
    of_block = next((p for p in block.parameters() if p.is_floating_point()), None)
    made.train(block.training)
    return made if of_block is None else made.to(of_block.device, of_block.dtype)


class _Plain(Connection):
    """Stands for "plain" when options are checked; it has none."""


def design_of(name: str) -> type[Connection] | None:
    """The design of that name; None for "plain". Raise UserError for an unknown name, suggesting the nearest one."""
    if isinstance(name, str) and name in get_args(Profile):
        raise UserError(
            f"residual: got {name!r}, which is a profile of widths, expected a design; for the profile, use "
            f"stepsnet.stepify(model, profile={name!r}) or a model's widths= as printed by stepsnet plan"
        )
    if not isinstance(name, str) or name not in DESIGNS:
        raise UserError(f"residual: got {name!r}, expected one of {', '.join(DESIGNS)}{nearest(str(name), DESIGNS)}")
    design = DESIGNS[name]
    if design is not None:
        check_design(name, design)
    return design


def check_named(name: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown design, or options that it does not have, regardless of any blocks."""
    check_options(name, design_of(name) or _Plain, options)


def _branch_at(block: nn.Module, parts: BranchParts | None) -> dict[str, Any]:
    """What a connection's :class:`Place` says of the branch that it joins."""
    if parts is None:
        return {}
    norm = block.get_submodule(parts.norm) if parts.norm else None
    return {"parts": parts, "norm": norm, "inputs": inputs_of_last(block, parts), "heads": heads_of(block, parts)}


def _check_places(blocks: Sequence[nn.Module], widths: Sequence[Any], first: Any, num_blocks: Any) -> None:
    """Raise UserError for a block that occurs twice, and for numbers that cannot be a width or the place of a block."""
    if len(set(blocks)) < len(blocks):
        raise UserError("residual: got the same block at several places, expected a separate block at each")
    of_widths = [("width", width, MOST_CHANNELS) for width in widths]
    for key, value, most in (*of_widths, ("first", first, None), ("num_blocks", num_blocks, None)):
        if value is None and key != "first":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= (most or MOST_BLOCKS):
            raise UserError(
                f"residual: {key}: got {value!r}, expected a whole number from 1 to {most or MOST_BLOCKS:,}"
            )
    if num_blocks is not None and num_blocks < first - 1 + len(blocks):
        raise UserError(f"residual: num_blocks: got {num_blocks}, expected at least {first - 1 + len(blocks)}")


def _parts_for(block: nn.Module, name: str, design: type[Connection], width: int | None) -> Sequence[BranchParts]:
    kind = type(block).__name__
    if hasattr(block, "read_width"):
        raise UserError(
            f"residual: {kind} is already a layer of a transformers model in steps, expected layers of a plain model; "
            "for a design in steps, use StepsTransformerConfig(residual=…)"
        )
    if "forward" in block.__dict__:
        raise UserError(
            f"residual: the forward pass of this {kind} has been replaced, as by compiling or checkpointing the block, "
            "expected blocks that are joined before that"
        )
    if design.unit == "block" and isinstance(block, nn.Sequential):  # it would run what the design adds, too
        raise UserError(
            f"residual: {name} joins a block by its forward pass, and {kind} is an nn.Sequential, which would run the "
            "design's parts as well; expected a block of another class"
        )
    check_channels(block, width)
    parts = parts_of(block)
    if parts is None and design.unit != "block":
        raise UserError(f"residual: {name} joins the branches of a block, and {undeclared(block)}")
    for part in design.needs:
        declared = [bool(getattr(one, part)) for one in parts or ()]
        if not (all(declared) if part in ("norm", "linears") else any(declared)) or not declared:
            how = "to declare it, give BranchParts to stepsnet.residual.declare_branches"
            if part != "norm" and any(isinstance(module, nn.MultiheadAttention) for module in block.modules()):
                how = "its nn.MultiheadAttention holds queries, keys and values in one parameter, not in linear layers"
            raise UserError(
                f"residual: {name} works on the {part} of a branch, which {name_of(block)} does not declare; {how}"
            )
    for one in parts or ():
        if "linears" in design.needs and (path := misses_linear(block, one)):
            raise UserError(
                f"residual: {name}: {path} of {kind} is not a linear layer that splits into the declared equal parts"
            )
        if design.scales_branches and (path := _scale_of(block, one)):
            raise UserError(
                f"residual: {name} scales the branches, and so does {path} of {kind}, expected only one of the two"
            )
    design.check_block(block, parts or ())
    return parts or ()


def _scale_of(block: nn.Module, parts: BranchParts) -> str:
    """The path of a LayerScale at the end of a branch: a module of that name, or a parameter as a factor; else ""."""
    for path in parts.after:
        part = attrgetter(path)(block)
        if isinstance(part, nn.Parameter) or type(part).__name__.startswith("LayerScale"):
            return path
    return ""


def _width_of(blocks: Sequence[nn.Module], parts: Sequence[Sequence[BranchParts]], given: int | None) -> int:
    """The width, by the norms in front of the branches if they are declared; else as given."""
    found: dict[int, int] = {}  # width -> the number of the first such block
    for number, (block, of_block) in enumerate(zip(blocks, parts), 1):
        for one in of_block:
            weight = getattr(block.get_submodule(one.norm), "weight", None) if one.norm else None
            if isinstance(weight, Tensor):
                found.setdefault(weight.shape[0], number)
    if len(found) > 1:
        places = ", ".join(f"{width} in block {number}" for width, number in found.items())
        raise UserError(f"residual: got blocks of several widths ({places}), expected one width")
    if found and given not in (None, *found):
        raise UserError(f"residual: width: got {given}, but the blocks' norms have {next(iter(found))} channels")
    if given or found:
        return given or next(iter(found))
    raise UserError(
        f"residual: the width of {name_of(blocks[0])} is not known, expected width=C, or branches declared by "
        "paths that begin with the norm"
    )
