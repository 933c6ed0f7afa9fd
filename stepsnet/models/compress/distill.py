"""A compressed network beside its teacher, the network that it comes from, and the two losses that train it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ...errors import UserError
from ...residual.design import precise
from .rotation import run
from .stream_parts import stream_parts_of

__all__ = ["Compressed"]

_IGNORED = -100  # as in torch's cross entropy


class Compressed:
    """What :func:`stepsnet.compress` returns.

    The losses are those of the experiment in `benchmarks/compress.py`: the stream loss for the first half of the
    updates, the logit loss for the second.

    Attributes:
        model: the StepsNet to train, which needs nothing else of this object. A wrapper around it, such as
            DistributedDataParallel, may take its place.
        teacher: the given network with its norms folded and its stream rotated, frozen: the first C_i channels of that
            stream are what the blocks of step i should make.
        widths, depths: those of the model's steps.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, widths: Sequence[int], depths: Sequence[int]):
        self.model = model.requires_grad_(True).train()
        self.teacher = teacher.requires_grad_(False).eval()
        self.widths, self.depths = tuple(widths), tuple(depths)
        blocks = [stream_parts_of(network).blocks for network in (model, teacher)]
        ends = [(end - 1, width) for end, depth, width in zip(accumulate(depths), depths, widths) if depth]
        self._ends = [[(of_one[index], width) for index, width in ends] for of_one in blocks]

    def to(self, *args: Any, **kwargs: Any) -> Compressed:
        """Move both networks to a device or a precision, as ``nn.Module.to`` does."""
        self.model.to(*args, **kwargs)
        self.teacher.to(*args, **kwargs)
        return self

    def stream_loss(self, inputs: Tensor) -> Tensor:
        """The mean over the steps of ``|y_i - t_i|² / |t_i|²``, a scalar.

        y_i is the stream after step i, and t_i the first C_i channels of the teacher's after the same block. The
        model's last norm and head get no gradient from it; under DistributedDataParallel, which waits for one, zeros.

        Args:
            inputs: images (B, C, H, W) or token ids (B, N).

        Raises:
            UserError: the model is compiled, so that its blocks are not seen.
        """
        with torch.no_grad(), _watching(self._ends[1]) as targets:
            run(self.teacher, inputs)
        with _watching(self._ends[0]) as found:
            output = run(self.model, inputs)
        if len(found) != len(targets):
            raise UserError("stream_loss: the model's blocks cannot be read, expected a model that is not compiled yet")
        errors = [(y - t).square().sum() / t.square().sum() for y, t in zip(found, targets)]
        loss = torch.stack(errors).mean()
        return loss + output.flatten()[:0].sum() if isinstance(self.model, DistributedDataParallel) else loss

    def logit_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean of the cross entropy and the Kullback-Leibler divergence from the teacher's probabilities, a scalar.

        Args:
            inputs: images (B, C, H, W) or token ids (B, N).
            labels: the classes of the images (B), or the token that follows each token (B, N), -100 where there is
                none.

        Raises:
            UserError: labels of another shape, or none that counts.
        """
        with torch.no_grad():
            theirs = precise(run(self.teacher, inputs))
        ours = precise(run(self.model, inputs))
        if labels.shape != ours.shape[:-1] or labels.is_floating_point():
            raise UserError(
                f"labels: got {labels.dtype} of shape {tuple(labels.shape)}, expected whole numbers of shape "
                f"{tuple(ours.shape[:-1])}"
            )
        counted = labels != _IGNORED
        if not counted.any():
            raise UserError(f"labels: got only {_IGNORED}, expected at least one that counts")
        ours, theirs, labels = ours[counted], theirs[counted], labels[counted]
        divergence = F.kl_div(
            F.log_softmax(ours, -1), F.log_softmax(theirs, -1), reduction="batchmean", log_target=True
        )
        return 0.5 * F.cross_entropy(ours, labels) + 0.5 * divergence


@contextmanager
def _watching(ends: Sequence[tuple[nn.Module, int]]) -> Iterator[list[Tensor]]:
    """Collect the first channels of the stream after each of the given blocks, in order, while their network runs."""
    found: list[Tensor] = []

    def keep(width: int) -> Any:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            found.append(precise((output[0] if isinstance(output, tuple) else output)[..., :width]))

        return hook

    hooks = [block.register_forward_hook(keep(width)) for block, width in ends]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()
