"""A compressed network beside the one that it comes from, and the two losses that teach it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .around import around
from .rotation import run

__all__ = ["Compressed"]


class Compressed:
    """What :func:`stepsnet.compress` returns.

    The losses are those of its experiment, `benchmarks/compress.py`: the stream for the first half of the updates, the
    logits for the second.

    Attributes:
        model: the StepsNet, to be trained; it is complete without what stands beside it.
        teacher: the given network's function with its stream rotated, frozen: its first C_i channels are what the
            blocks of step i are to make.
        widths, depths: of the model's steps.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, widths: Sequence[int], depths: Sequence[int]):
        self.model = model.requires_grad_(True).train()
        self.teacher = teacher.requires_grad_(False).eval()
        self.widths, self.depths = tuple(widths), tuple(depths)

    def to(self, *args: Any, **kwargs: Any) -> Compressed:
        """Both networks to a device or a precision, as ``nn.Module.to``."""
        self.model.to(*args, **kwargs)
        self.teacher.to(*args, **kwargs)
        return self

    def stream_loss(self, inputs: Tensor) -> Tensor:
        """The mean over the steps of |y_i - t_i|² / |t_i|², a number.

        y_i is the stream behind step i and t_i the first C_i channels of the teacher's behind the same block.

        Args:
            inputs: images (B, C, H, W) or token ids (B, N).
        """
        with torch.no_grad(), self._streams(self.teacher) as targets:
            run(self.teacher, inputs)
        with self._streams(self.model) as found:
            run(self.model, inputs)
        errors = [(y - t).square().sum() / t.square().sum() for y, t in zip(found, targets)]
        return torch.stack(errors).mean()

    def logit_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean of cross entropy and of the Kullback-Leibler divergence from the teacher's probabilities, a number.

        Args:
            inputs: images (B, C, H, W) with their classes (B) as labels, or token ids (B, N) with the tokens that
                follow each (B, N), -100 where there is none.
        """
        with torch.no_grad():
            theirs = run(self.teacher, inputs).flatten(0, -2).float()
        ours, labels = run(self.model, inputs).flatten(0, -2).float(), labels.flatten()
        counted = labels != -100
        divergence = F.kl_div(F.log_softmax(ours, -1), F.log_softmax(theirs, -1), reduction="none", log_target=True)
        divergence = (divergence.sum(-1) * counted).sum() / counted.sum()
        return 0.5 * F.cross_entropy(ours, labels) + 0.5 * divergence

    @contextmanager
    def _streams(self, network: nn.Module) -> Iterator[list[Tensor]]:
        """The first C_i channels behind each step that has blocks, while the network runs."""
        blocks, found, hooks, end = around(network).blocks, [], [], 0

        def keep(width: int) -> Any:
            def hook(block: nn.Module, args: Any, output: Any) -> None:
                y = output[0] if isinstance(output, tuple) else output
                found.append(y[..., :width].float())

            return hook

        for width, depth in zip(self.widths, self.depths):
            end += depth
            if depth:
                hooks.append(blocks[end - 1].register_forward_hook(keep(width)))
        try:
            yield found
        finally:
            for handle in hooks:
                handle.remove()
