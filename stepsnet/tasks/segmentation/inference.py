"""Inference on an image of any size: at one or several scales, in one piece or in sliding windows, with flips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional as F

from .transforms import fit_within

__all__ = ["Inference"]


@dataclass(frozen=True)
class Inference:
    """How a model is run on an image; the defaults are Swin's at a single scale.

    Calling an instance runs a model on an image.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: tuple[int, int]  # the long and short side, in pixels, that the image is resized to fit
    window: int | None = None  # side of square windows in pixels; None: the image in one piece
    stride: int | None = None  # pixels from one window to the next; None: the side of a window
    scales: tuple[float, ...] = (1.0,)  # factors of ``scale``; the probabilities are averaged over them
    flip: bool = False  # average over the flipped image too

    def passes(self, size: tuple[int, int]) -> int:
        """The number of forward passes for an image of size (H, W)."""
        windows = sum(len(list(self._windows(self._resized(size, ratio)))) for ratio in self.scales)
        return windows * (1 + self.flip)

    @torch.no_grad()
    def __call__(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return log-probabilities (classes, H, W) for an image (3, H, W) uint8."""
        height, width = image.shape[-2:]
        total: Tensor | None = None
        for ratio in self.scales:
            resized = F.resize(image, list(self._resized((height, width), ratio)), antialias=True)
            inputs = F.normalize(F.to_dtype(resized, torch.float32, scale=True), list(self.mean), list(self.std))
            for flipped in (False, True)[: 1 + self.flip]:
                logits = self._slide(model, inputs.flip(-1) if flipped else inputs)  # (1, classes, h, w)
                logits = logits.flip(-1) if flipped else logits
                logits = interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
                found = _log_softmax_in_place(logits[0])
                total = found if total is None else torch.logaddexp(total, found, out=total)
        assert total is not None
        return total.sub_(math.log(len(self.scales) * (1 + self.flip)))

    def _resized(self, size: tuple[int, int], ratio: float) -> tuple[int, int]:
        return fit_within(size, (self.scale[0] * ratio, self.scale[1] * ratio))

    def _slide(self, model: nn.Module, image: Tensor) -> Tensor:
        """Average the logits of all windows that cover a pixel: (3, h, w) -> (1, classes, h, w)."""
        height, width = image.shape[-2:]
        total, seen = None, image.new_zeros(height, width)
        for rows, columns in self._windows((height, width)):
            logits = model(image[None, :, rows, columns]).float()
            total = logits.new_zeros(1, logits.shape[1], height, width) if total is None else total
            total[..., rows, columns] += logits
            seen[rows, columns] += 1
        assert total is not None
        return total / seen

    def _windows(self, size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
        """The rows and columns of each window; the last one in a row or column is moved back inside the image."""
        if self.window is None:
            yield slice(0, size[0]), slice(0, size[1])
            return
        window, stride = self.window, self.stride or self.window
        firsts = [[min(first, side - window) for first in range(0, side - window + stride, stride)] for side in size]
        tops, lefts = (found if side > window else [0] for found, side in zip(firsts, size))
        yield from ((slice(top, top + window), slice(left, left + window)) for top, left in product(tops, lefts))


def _log_softmax_in_place(logits: Tensor) -> Tensor:
    """Log-softmax of (classes, H, W) in bands of rows: an image of 12 megapixels has gigabytes of logits."""
    for rows in logits.split(64, dim=1):
        rows -= rows.logsumexp(0)
    return logits
