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
# What a width has to be: one that heads divide, whose size may change; the same, and their size is even, as rotary
# positions need it; a multiple of the heads' size, which stays; or any, with the heads' size as it is
HeadRule = Literal["divide", "even", "multiple", "any"]


@dataclass(frozen=True)
class BlockAdapter:
    """How blocks of one class are built at another width.

    Args:
        rebuild: (block, width, heads) -> a block like it at that width; heads is None for blocks without.
        num_heads: (block) -> its attention heads, or None.
        head_rule: (block) -> what the widths of the block have to be.
        head_size: (block) -> D.
        kv_groups: (block) -> query heads for each key and value head; the heads stay a multiple of it.
        drop_paths: the paths of stochastic depth in the block, a module or None; every new block gets its own rate.
        outputs: the paths of the modules that make what is added; with their weights and biases at zero, the block
            leaves the stream as it is. None: not known, and then a model of such blocks does not grow.
        initialize: (model, original blocks), the initialization of a whole model with such blocks, as its library
            does it; None where the blocks that ``rebuild`` makes are initialized.
        start: values of parameters that nothing in the library initializes again, by path. Where all the blocks of a
            model have one value, it is taken from there.
        dim: the channel dimension: 1, -1, or None for the one that residual/channels.py finds.
        constructed: ``rebuild`` is no more than the constructor, behind which the model may have started its blocks
            anew, as by ``self.apply(self._init_weights)``; new ones are started so too.
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
        heads: where a block has its number of attention heads, such as "attn.num_heads"; it has to divide the width.
        branches: what the block adds to the residual stream, see :func:`stepsnet.residual.declare_branches`; None
            leaves what has been declared.
        dim: the channel dimension, 1 or -1; by default the last, but of blocks with convolutions or batch norms the
            one whose size their norms have, or 1 where these leave it open, in series and videos if a block begins
            with one of these layers.
    """

    def of_block(block: nn.Module) -> int | None:
        if heads is None:
            return None
        number = get_path(block, heads) if has_path(block, heads) else None
        if not isinstance(number, int):
            there = f"got {number!r} there" if has_path(block, heads) else "there is no such attribute"
            name = type(block).__name__
            raise UserError(f"register_block: heads={heads!r}: {there} in {name}, expected its number of heads")
        return number

    ADAPTERS[block_class] = BlockAdapter(rebuild, num_heads=of_block, dim=dim)
    if branches is not None:
        declare_branches(block_class, branches)


def declare(block_class: type[nn.Module], roles: Roles | Callable[[Any], Roles], **options: Any) -> None:
    """A row for a class whose sizes are declared, see :class:`Roles`; for blocks of several kinds as a function."""

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
    """The adapter's block, with what goes wrong in it as one line."""
    where = f"stepify: {where.lstrip('.') or 'the model'}"
    try:
        new = adapter.rebuild(block, width, heads)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except OF_MODULES as error:
        groups = max((one.num_groups for one in block.modules() if isinstance(one, nn.GroupNorm)), default=1)
        hint = f"; its groups divide the multiples of {groups}, which round_to={groups} gives" if width % groups else ""
        raise UserError(f"{where}: {type(block).__name__} at width {width}: {in_a_line(error)}{hint}") from error
    if not isinstance(new, nn.Module):
        raise UserError(
            f"{where}: {type(block).__name__} at width {width}: rebuild returned {type(new).__name__}, expected a block"
        )
    return new


def initializer_of(model: Any) -> Callable[[], Any] | None:
    """A model's own function for all its weights, as timm's models have it; None where it asks for arguments."""
    whole, of_module = (getattr(model, name, None) for name in ("init_weights", "_init_weights"))
    if callable(whole) and _takes(whole):
        return whole
    return partial(model.apply, of_module) if callable(of_module) and _takes(of_module, model) else None


def initialize_like(model: Any, originals: Sequence[Any] = ()) -> None:
    """Start all weights as the model's own function does, or that of timm's file which its class is from.

    Around blocks in a model of one's own there may be neither: then they stay as their constructors have them.
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
