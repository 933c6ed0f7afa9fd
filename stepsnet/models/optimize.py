"""Makes a model quicker on its device without changing its weights or, beyond rounding, its outputs.

Each part is here because it helped in an interleaved measurement; docs/speed.md has these, and what did not help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from ..errors import UserError, nearest
from .blocks import blocks_of
from .compilation import FrozenForward, compile_blocks, restore_forward
from .cuda_graph import GraphedInference
from .windows import permute_windows, restore_windows

__all__ = ["optimize"]

PURPOSES = ("inference", "training")
FROZEN_BLOCKS = 40  # deeper models are compiled by the block: the time of one graph grows with the depth
HEADS_ON_GPUS = 8  # sizes that are not multiples of it are slower with permuted windows
Model = TypeVar("Model", bound=nn.Module)


def optimize(
    model: Model, for_: str = "inference", *, compile: bool = True, recomputed: Sequence[nn.Module] = ()
) -> Model:
    """Make a model of any library quicker on its device, in place.

    Weights and state dict stay the same, outputs change only by rounding, and calling it twice has the effect of one
    call.

    For inference on a CPU, the windows of Swin's blocks are permuted by one index and attended with
    ``scaled_dot_product_attention``, convolutional networks keep their channels last, and with ``compile`` a model of
    up to 40 blocks becomes one frozen graph for each input shape, up to eight. On CUDA without ``compile``, the windows
    are permuted as well, unless a head's width is not a multiple of 8. Elsewhere, in deeper models and for training,
    ``compile`` compiles one block at a time, and the blocks of one width share their graphs; for inference on CUDA, the
    whole model is then replayed as a CUDA graph for each input shape, up to eight, which helps small batches most
    (docs/speed.md). Convolutional networks that train on a CPU keep their channels last instead.

    For inference, everything but the order of the channels and the blocks' own graphs takes effect only under
    ``torch.inference_mode()`` or ``torch.no_grad()``; with gradients on, the model runs as it was built. Weights whose
    channels are last are not contiguous, which safetensors requires: before another library writes them, restore them
    with ``model.to(memory_format=torch.contiguous_format)``.

    A weight that is written to in place, loaded or moved is noticed. What leaves no trace is not: on a CPU, a write
    through ``.data``, such as ``weight.data.copy_(new)``, and a hook that is registered on a part of the model after
    its first call as one graph. On CUDA, a new value of a plain attribute, such as ``drop_prob``, goes unnoticed too.
    Call ``optimize`` again after any of these.

    Args:
        for_: ``"inference"``, which also sets the model to evaluation mode, or ``"training"``.
        compile: use torch.compile, which takes from seconds to a minute when the model is first called, and needs a C++
            compiler or, on CUDA, a C compiler; without it there is no such wait.
        recomputed: blocks whose activations will be recomputed, as for :func:`compile_blocks`.

    Returns:
        The model.

    Raises:
        UserError: an unknown purpose, something that is not a model, or, for training with ``compile``, a model
            without a sequence of blocks.
    """
    if for_ not in PURPOSES:
        known = " or ".join(PURPOSES)
        raise UserError(f"optimize: got for_={for_!r}, expected {known}{nearest(str(for_), PURPOSES)}")
    if not isinstance(model, nn.Module):
        raise UserError(f"optimize: got {str(model)[:40]!r}, expected a model")
    restore_forward(model)
    restore_windows(model)  # otherwise a graph would read an earlier size's order where that was
    device = next((p.device.type for p in model.parameters()), "cpu")
    on_cpu = device == "cpu"
    if for_ == "training":
        if on_cpu and _is_convolutional(model):  # compiling makes it slower
            _put_channels_last(model)
        elif compile:
            compile_blocks(model, recomputed)
        return model
    model.eval()
    if on_cpu:
        permute_windows(model)
        if _is_convolutional(model):
            _put_channels_last(model)
    elif device == "cuda" and not compile:
        permute_windows(model, HEADS_ON_GPUS)
    # a language model is called with another shape for each token, a detector with a list of images
    if not compile or hasattr(model, "generate"):
        return model
    blocks = blocks_of(model)
    if on_cpu and len(blocks) <= FROZEN_BLOCKS and not hasattr(model, "roi_heads"):
        model.forward = FrozenForward(model, model.__dict__.get("forward"))
    elif blocks:
        compile_blocks(model)
        if device == "cuda" and not hasattr(model, "roi_heads"):
            model.forward = GraphedInference(model, model.__dict__.get("forward"))
    return model


def _put_channels_last(model: nn.Module) -> None:
    """As ``model.to(memory_format=…)``, which would fail at the five dimensions of a Conv3d's weights."""
    model._apply(lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor)


def _is_convolutional(model: nn.Module) -> bool:
    """Whether the model is a classifier with most weights in dense convolutions, and batch norms, as a ResNet is."""
    if hasattr(model, "trunk"):  # a detector or a segmenter; its head would be counted too
        return False
    kinds = [type(module) for module in model.modules()]
    kernels = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups == 1)
    return nn.BatchNorm2d in kinds and 2 * kernels > sum(p.numel() for p in model.parameters())
