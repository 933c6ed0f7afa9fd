"""How residual blocks are built at another width: one row for each class of blocks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from timm.models._manipulate import named_apply
from torch import nn

from ...errors import UserError, in_a_line
from ...macs import OF_MODULES
from ...residual.known_blocks import BranchDeclaration, declare_branches
from .roles import Roles, get_path, has_path, rebuild, sizes_of

__all__ = [
    "ADAPTERS",
    "BlockAdapter",
    "HeadRule",
    "declare",
    "initialize_like",
    "initializer_of",
    "rebuilt",
    "register_block",
]

Rebuild = Callable[[Any, int, int | None], nn.Module]
# What a block requires of its widths. "divide": the number of heads divides the width, and their size may change;
# "even": the same, but the size is even, as rotary positions require; "multiple": the width is a multiple of the size
# of a head, which stays as it is; "any": any width, and the size of a head stays as it is
HeadRule = Literal["divide", "even", "multiple", "any"]


@dataclass(frozen=True)
class BlockAdapter:
    """How blocks of one class are built at another width.

    Args:
        rebuild: (block, width, heads) -> a block like the given one at that width; heads is None for blocks that have
            none.
        num_heads: (block) -> its number of attention heads, or None.
        head_rule: (block) -> what the block requires of its widths, a ``HeadRule``.
        head_size: (block) -> D, the size of a head.
        kv_groups: (block) -> the number of query heads per key and value head; the number of heads stays a multiple
            of it.
        drop_paths: the paths of stochastic depth in the block, each a module or None; every new block gets its own
            rate.
        outputs: the paths of the modules that produce what the block adds; with their weights and biases at zero, the
            block leaves the stream as it is. None if they are not known; a model of such blocks cannot grow.
        initialize: (model, original blocks), initializes a whole model with such blocks, as its library does it; None
            if the blocks that ``rebuild`` returns are initialized already.
        start: values, by path, of parameters that no function of the library initializes again. If a parameter has one
            and the same value throughout the original blocks, that is used instead.
        dim: the channel dimension: 1, -1, or None for the one that residual/channels.py finds.
        constructed: whether ``rebuild`` only calls the constructor. The model may have initialized its blocks again
            after constructing them, as by ``self.apply(self._init_weights)``; then new blocks get the same treatment.
    """

    rebuild: Rebuild
    num_heads: Callable[[Any], int | None] = lambda block: None
    head_rule: Callable[[Any], HeadRule] = lambda block: "divide"
    head_size: Callable[[Any], int] | None = None
    kv_groups: Callable[[Any], int] = lambda block: 1
    drop_paths: Sequence[str] = ()
    outputs: Sequence[str] | None = None
    initialize: Callable[[Any, Sequence[Any]], None] | None = None
    start: dict[str, float] | None = None
    dim: int | None = None
    constructed: bool = False


ADAPTERS: dict[type[nn.Module], BlockAdapter] = {}


def register_block(
    block_class: type[nn.Module],
    rebuild: Rebuild,
    *,
    heads: str | None = None,
    branches: Sequence[BranchDeclaration] | None = None,
    dim: int | None = None,
) -> None:
    """Let :func:`stepsnet.stepify` build blocks of a class of your own at other widths.

    Args:
        rebuild: (block, width, heads) -> a new, initialized block like this one for a residual stream of ``width``
            channels; ``heads`` is None unless the next argument is given.
        heads: the path of a block's number of attention heads, such as "attn.num_heads"; the number has to divide the
            width.
        branches: what the block adds to the residual stream, see :func:`stepsnet.residual.declare_branches`; None
            keeps what has been declared before.
        dim: the channel dimension, 1 or -1. By default it is the last; for blocks with convolutions or batch norms it
            is the one whose size their norms have, or, if the norms leave it open, dimension 1 (in series and videos
            only if the block begins with one of these layers).
    """

    def of_block(block: nn.Module) -> int | None:
        if heads is None:
            return None
        number = get_path(block, heads) if has_path(block, heads) else None
        if not isinstance(number, int):
            there = f"got {number!r}" if has_path(block, heads) else "there is no such attribute"
            name = type(block).__name__
            raise UserError(
                f"register_block: heads={heads!r}: {there} in {name}, expected the path of its number of heads"
            )
        return number

    ADAPTERS[block_class] = BlockAdapter(rebuild, num_heads=of_block, dim=dim)
    if branches is not None:
        declare_branches(block_class, branches)


def declare(block_class: type[nn.Module], roles: Roles | Callable[[Any], Roles], **options: Any) -> None:
    """Add a row for a class whose sizes are declared by :class:`Roles`, or by a function if its blocks differ."""

    def roles_of(block: nn.Module) -> Roles:
        return roles if isinstance(roles, Roles) else roles(block)

    def by_roles(block: nn.Module, width: int, heads: int | None) -> nn.Module:
        return rebuild(roles_of(block), block, width, heads, adapter.head_rule(block) != "divide")

    adapter = BlockAdapter(
        by_roles,
        num_heads=lambda block: sizes_of(roles_of(block), block).get("N"),
        head_size=lambda block: sizes_of(roles_of(block), block)["D"],
        **options,
    )
    ADAPTERS.setdefault(block_class, adapter)  # a user may have registered the class before the table was read


def rebuilt(adapter: BlockAdapter, block: nn.Module, width: int, heads: int | None, where: str) -> nn.Module:
    """The block that the adapter builds at another width; an error in building it becomes a UserError of one line."""
    where = f"stepify: {where.lstrip('.') or 'the model'}"
    try:
        new = adapter.rebuild(block, width, heads)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except OF_MODULES as error:
        groups = max((one.num_groups for one in block.modules() if isinstance(one, nn.GroupNorm)), default=1)
        hint = f"; its GroupNorm needs a multiple of {groups}, see round_to={groups}" if width % groups else ""
        raise UserError(f"{where}: {type(block).__name__} at width {width}: {in_a_line(error)}{hint}") from error
    if not isinstance(new, nn.Module):
        raise UserError(
            f"{where}: {type(block).__name__} at width {width}: rebuild returned {type(new).__name__}, expected a block"
        )
    return new


def initializer_of(model: Any) -> Callable[[], Any] | None:
    """A model's own function that initializes all its weights, as timm's models have; None if it needs arguments."""
    whole, of_module = (getattr(model, name, None) for name in ("init_weights", "_init_weights"))
    if callable(whole) and _takes(whole):
        return whole
    return partial(model.apply, of_module) if callable(of_module) and _takes(of_module, model) else None


def initialize_like(model: Any, originals: Sequence[Any] = ()) -> None:
    """Initialize all weights by the model's own function, or else by that of the timm file which its class is from.

    A user's own model around the blocks may have neither: then the weights stay as the constructors set them.
    """
    homes = (cls.__module__ for cls in type(model).__mro__)
    home = next((name for name in homes if name.startswith("timm.models.")), None)
    of_file = getattr(sys.modules[home], "_init_weights", None) if home else None
    if (whole := initializer_of(model)) is not None:
        whole()
    elif callable(of_file) and _takes(of_file, model, ""):
        named_apply(of_file, model)


def _takes(function: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
