"""Multiply-accumulates of a forward pass, counted on the meta device: no kernel of any device is run or chosen.

Convolutions, linear layers and both attention products are counted and, by the paper's conventions, 5 per element of
an affine LayerNorm and 2 per element of a BatchNorm, as in fvcore. Other element-wise products are not counted.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["HOOKS", "OF_MODULES", "count_forward", "count_on_meta", "held_tensors", "on_meta", "with_own_tensors"]

T = TypeVar("T")

aten = torch.ops.aten
# what a model's or a block's own code may raise
OF_MODULES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
HOOKS = {name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict)}


def count_forward(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Return the multiply-accumulates of ``model(*args, **kwargs)`` in evaluation mode, and what it returns.

    The arguments are on the meta device, the model on any. A copy of it runs, with its hooks, since they are part of
    the network in some designs of the residual stream.
    """
    return count_on_meta(on_meta(model, with_hooks=True), *args, **kwargs)


def count_on_meta(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """The same as :func:`count_forward`, for a model that :func:`on_meta` has made."""

    def count() -> tuple[int, Any]:
        counter = FlopCounterMode(display=False, custom_mapping=_ADDED)
        with torch.no_grad(), counter:
            outputs = model(*args, **kwargs)
        return counter.get_total_flops() // 2, outputs  # the counter counts a multiply-accumulate as two

    return with_own_tensors(count)


def with_own_tensors(run: Callable[[], T]) -> T:
    """Run a pass on the meta device, also of a model that makes tensors on the CPU, such as a mask.

    Such tensors are made on the meta device only if the pass fails without, since a model may read a value of theirs.
    """
    try:
        return run()
    except RuntimeError as error:
        if not re.search("expected device|same device", str(error)):
            raise
    with torch.device("meta"):
        return run()


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and any other tensors in attributes of its modules, such as those that a pass left there."""
    held = (value for module in model.modules() for value in tree_leaves(vars(module)))
    return (value for value in held if isinstance(value, Tensor))


def on_meta(model: nn.Module, with_hooks: bool = False) -> nn.Module:
    """A copy on the meta device in evaluation mode, so that a forward pass changes no state in the model itself.

    No parameter requires a gradient: the counter would ask for that of one that is the input of a module, such as
    CaiT's class token. Hooks are left out by default, since a user's may keep what it sees.
    """
    memo: dict[int, Any] = {}  # by the id of a part, what takes its place in the copy
    if not with_hooks:
        for module in model.modules():
            memo |= {id(hooks): type(hooks)() for name, hooks in vars(module).items() if name in HOOKS}
    for tensor in held_tensors(model):
        there = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(there.to("meta"), False)
        elif tensor.dim() or tensor.is_meta:
            memo[id(tensor)] = there.to("meta")
        else:  # a model may read a scalar, and one on the CPU works with tensors of any device
            memo[id(tensor)] = there.cpu().clone()
    copied: Any = copy.deepcopy(model, memo).eval()
    for module in copied.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            config._attn_implementation = "eager"  # FlexAttention and FlashAttention do not run on this device
        kinds = getattr(module, "rope_type", None)  # in some families a dict, by the type of layer
        if isinstance(kinds, dict):
            module.rope_type = {layers: _of_any_length(kind) for layers, kind in kinds.items()}
        elif kinds is not None:
            module.rope_type = _of_any_length(kinds)
    return copied


def _of_any_length(rope_type: Any) -> Any:
    """A type of rotary positions that does not read the last one's number, which the meta device does not have."""
    return "default" if rope_type == "dynamic" else rope_type


def _layer_norm(input_shape, normalized_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 0 if weight_shape is None else 2 * 5 * prod(input_shape)


def _batch_norm(input_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 0 if weight_shape is None else 2 * 2 * prod(input_shape)


def _matrix_by_vector(matrix_shape, vector_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * prod(matrix_shape)


_ADDED = {
    aten.mv: _matrix_by_vector,  # torch's own formulas leave it out
    aten.native_layer_norm: _layer_norm,
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit_no_training: _batch_norm,
    aten.cudnn_batch_norm: _batch_norm,
}
