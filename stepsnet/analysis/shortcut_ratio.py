"""The shortcut ratio of Sec. 3.1: γ_l = σ_0/σ_l, how much of the input is left after l blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..stream import step_sequences

__all__ = ["shortcut_ratios"]


@torch.no_grad()
def shortcut_ratios(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """γ after every block, on the full residual stream, in evaluation mode.

    σ is the standard deviation over the channels of each token, as a LayerNorm takes it, averaged over
    tokens and images. In a hierarchical model each stage starts from its own z_0.

    Args:
        model: one whose blocks are in StepsNets (the baselines are 1-step ones).
        images: (B, C, H, W), a batch of real data.

    Returns:
        ``{"kind": "shortcut_ratio", "widths": […], "gamma": […]}``, a value a block.

    Raises:
        ValueError: the model has no StepsNet.
    """
    containers = step_sequences(model)
    inputs: dict[nn.Module, Tensor] = {}
    hooks = [
        container.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args[0]))
        for container in containers
    ]
    if not hooks:
        raise ValueError(f"model: got {type(model).__name__}, expected one with a StepsNet in it")
    training = model.training
    model.eval()
    try:
        model(images)
        widths, gammas = [], []
        for container in containers:
            z = inputs[container]
            start = z.std(container.dim).mean()
            for block in container:
                z = block(z)
                widths.append(block.width)
                gammas.append((start / z.std(container.dim).mean()).item())
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    return {"kind": "shortcut_ratio", "widths": widths, "gamma": gammas}
