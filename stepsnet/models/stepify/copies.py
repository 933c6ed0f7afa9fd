"""Whether a model can be copied, and what in it cannot."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ...errors import UserError, in_a_line
from ...macs import on_meta

__all__ = ["check_copies", "check_leaves"]


def check_copies(model: nn.Module) -> None:
    """Raises UserError for a model that ``copy.deepcopy`` cannot copy, naming the attribute if it is found."""
    if lazy := next((where for where, value in _held(model) if is_lazy(value)), None):
        raise UserError(f"stepify: {lazy} has no shape yet, expected a model after its first forward pass")
    try:
        on_meta(model, with_hooks=True)
    except Exception as error:  # whatever an object of the user's raises
        raise UserError(
            f"stepify: {_not_copied(model)} cannot be copied ({in_a_line(error)[:200]}), expected a model that "
            "copy.deepcopy can copy"
        ) from error


def check_leaves(model: nn.Module, replaced: Collection[nn.Module]) -> None:
    """Raises UserError for a tensor computed from weights, which cannot be copied, outside of the replaced blocks."""
    left_out = {inner for block in replaced for inner in block.modules()}
    for where, value in _held(model, left_out):
        if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in tree_leaves(value)):
            raise UserError(
                f"stepify: {where} is computed from weights, and such a tensor cannot be copied; expected it detached, "
                "or weight_norm of torch.nn.utils.parametrizations in place of that of torch.nn.utils"
            )


def _held(model: nn.Module, left_out: Collection[nn.Module] = ()) -> Iterator[tuple[str, Any]]:
    """The path and the value of each attribute, parameter and buffer of a model's modules."""
    for path, module in model.named_modules():
        if module in left_out:
            continue
        named = {
            key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")
        }
        for name, value in (named | module._parameters | module._buffers).items():
            yield ".".join(filter(None, (type(model).__name__, path, name))), value


def _not_copied(model: nn.Module) -> str:
    """The path of the attribute that cannot be copied; if none is found, the name of the model's class."""
    memo: dict[int, Any] = {id(one): one for one in (*model.modules(), *model.parameters(), *model.buffers())}
    for where, value in _held(model):
        try:
            copy.deepcopy(value, memo)
        except Exception:
            return where
    return type(model).__name__
