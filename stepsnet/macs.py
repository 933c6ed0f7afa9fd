"""Multiply-accumulates of a forward pass, counted on the meta device: no kernel of any device is run or chosen.

Convolutions, linear layers and both attention products are counted, and by the paper's conventions 5 per element of
an affine LayerNorm and 2 per element of a BatchNorm, as fvcore does. Other products of elements are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["call_in_evaluation", "count_forward"]

aten = torch.ops.aten


def count_forward(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Multiply-accumulates of ``model(*args, **kwargs)`` in evaluation mode, and what it returns.

    The arguments are on the meta device, the model on any; its parameters are not used but their shapes.
    """
    # detached: the counter asks what a model feeds its parameters to, such as CaiT's class token, for a gradient
    tensors = {name: tensor.detach().to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    counter = FlopCounterMode(display=False, custom_mapping=_ADDED)
    with torch.no_grad(), counter:
        outputs = call_in_evaluation(model, tensors, args, kwargs)
    return counter.get_total_flops() // 2, outputs  # the counter takes a multiply-accumulate for two


def call_in_evaluation(
    model: nn.Module, tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``model(*args, **kwargs)`` in evaluation mode with other parameters and buffers; its modes stay what they are."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return torch.func.functional_call(model, dict(tensors), tuple(args), dict(kwargs))
    finally:
        for module, mode in training.items():
            module.training = mode


def _layer_norm(input_shape, normalized_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 0 if weight_shape is None else 2 * 5 * prod(input_shape)


def _batch_norm(input_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 0 if weight_shape is None else 2 * 2 * prod(input_shape)


def _matrix_by_vector(matrix_shape, vector_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * prod(matrix_shape)


_ADDED = {
    aten.mv: _matrix_by_vector,  # which torch's own formulas leave out
    aten.native_layer_norm: _layer_norm,
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit_no_training: _batch_norm,
    aten.cudnn_batch_norm: _batch_norm,
}
