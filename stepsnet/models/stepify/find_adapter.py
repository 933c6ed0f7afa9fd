"""Which adapter a block has: the row of its class, or its constructor if that takes the width and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .adapters import ADAPTERS, BlockAdapter
from .differences import OF_TORCH, signature_of

__all__ = ["adapter_declared_for", "adapter_of"]


def adapter_of(block: nn.Module, width: int, others: Sequence[nn.Module] = ()) -> BlockAdapter | None:
    """The adapter of a block's class, or one that calls its constructor if that takes the width and nothing else.

    The constructor has to reproduce the block, and the ``others`` of its class, from their own ``width``: then it was
    given nothing else that affects shapes or attributes. What affects only weights, such as the scale that all blocks
    start with, is taken from the blocks when new ones are initialized.
    """
    found = adapter_declared_for(block)
    if found is None and _takes_its_width([block, *others], width):
        return BlockAdapter(lambda block, width, heads: type(block)(width), constructed=True)
    return found


def adapter_declared_for(block: nn.Module) -> BlockAdapter | None:
    """The row of the block's class, from timm's table or a user's own; None if there is none."""
    if any(cls.__module__.startswith("timm.") for cls in type(block).__mro__):
        from . import adapters_timm  # noqa: F401 - declares its rows
    return ADAPTERS.get(type(block))


def _takes_its_width(blocks: Sequence[nn.Module], width: int) -> bool:
    state = torch.random.get_rng_state()
    try:
        again = type(blocks[0])(width)
    except Exception:  # whatever a constructor does with arguments that it does not expect
        return False
    finally:
        torch.random.set_rng_state(state)
    made = signature_of(again)
    return all(
        made == signature_of(block) and all(map(_equal_attributes, again.modules(), block.modules()))
        for block in blocks
    )


def _equal_attributes(one: nn.Module, other: nn.Module) -> bool:
    """Whether both modules were built with the same arguments, judged by their attributes as they are.

    A signature looks only so deep, and looks into objects that cannot be compared; here these count as different.
    """
    mine, theirs = ({k: v for k, v in vars(m).items() if k not in OF_TORCH} for m in (one, other))
    try:
        return mine.keys() == theirs.keys() and all(v is theirs[k] or bool(v == theirs[k]) for k, v in mine.items())
    except (RuntimeError, TypeError, ValueError):  # tensors of several numbers, and what cannot be compared
        return False
