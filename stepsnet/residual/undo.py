"""Blocks as they were, where a design fails after it has changed some of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["unchanged_on_error"]


@contextmanager
def unchanged_on_error(blocks: Iterable[nn.Module], with_values: bool) -> Iterator[None]:
    """Classes, parts and hooks of blocks, in place, are what they were if what is run in it raises.

    Args:
        with_values: whether the values of the parameters are too; they are copied for that.
    """
    blocks = list(blocks)
    objects: dict[int, Any] = {id(one): one for block in blocks for one in (*block.modules(), *block.parameters())}
    kept = [(one, type(one), dict(one.__dict__)) for one in objects.values()]
    # in place too: the handle of a hook knows the very dictionary that it is in
    inside = [
        (part, copy.copy(part)) for _, _, state in kept for part in state.values() if isinstance(part, dict | set)
    ]
    parameters = [one for one in objects.values() if isinstance(one, nn.Parameter)] if with_values else []
    values = [(one, one.detach().clone()) for one in parameters]
    try:
        yield
    except BaseException:
        for one, kind, state in kept:
            if type(one) is not kind:
                one.__class__ = kind
            one.__dict__.clear()
            one.__dict__.update(state)
        for part, content in inside:
            part.clear()
            part.update(content)
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        raise
