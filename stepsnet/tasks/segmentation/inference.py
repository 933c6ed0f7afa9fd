"""The classes of a whole picture: at one size or at several, in one piece or by sliding windows, flipped or not."""

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
    """How a picture is tested; the defaults are Swin's at a single scale."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: tuple[int, int]  # long and short side that the picture is resized to fit within
    window: int | None = None  # side of square windows; None is the whole picture
    stride: int | None = None  # from one window to the next; None is a window's side
    scales: tuple[float, ...] = (1.0,)  # of several, and of flipped ones, the probabilities are averaged
    flip: bool = False

    def passes(self, size: tuple[int, int]) -> int:
        """How often the model runs for a picture of (H, W)."""
        windows = sum(len(list(self._windows(self._resized(size, ratio)))) for ratio in self.scales)
        return windows * (1 + self.flip)

    @torch.no_grad()
    def __call__(self, model: nn.Module, picture: Tensor) -> Tensor:
        """(3, H, W) uint8 -> log-probabilities (classes, H, W), at the picture's own size."""
        height, width = picture.shape[-2:]
        total: Tensor | None = None
        for ratio in self.scales:
            resized = F.resize(picture, list(self._resized((height, width), ratio)), antialias=True)
            image = F.normalize(F.to_dtype(resized, torch.float32, scale=True), list(self.mean), list(self.std))
            for flipped in (False, True)[: 1 + self.flip]:
                logits = self._slide(model, image.flip(-1) if flipped else image)  # (1, classes, h, w)
                logits = logits.flip(-1) if flipped else logits
                logits = interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
                found = _log_softmax_in_place(logits[0])
                total = found if total is None else torch.logaddexp(total, found, out=total)
        assert total is not None
        return total.sub_(math.log(len(self.scales) * (1 + self.flip)))

    def _resized(self, size: tuple[int, int], ratio: float) -> tuple[int, int]:
        return fit_within(size, (self.scale[0] * ratio, self.scale[1] * ratio))

    def _slide(self, model: nn.Module, image: Tensor) -> Tensor:
        """Mean logits over the windows that see a pixel: (3, h, w) -> (1, classes, h, w)."""
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
        """The last window of a row or column is moved back inside."""
        if self.window is None:
            yield slice(0, size[0]), slice(0, size[1])
            return
        window, stride = self.window, self.stride or self.window
        firsts = [[min(first, side - window) for first in range(0, side - window + stride, stride)] for side in size]
        tops, lefts = (found if side > window else [0] for found, side in zip(firsts, size))
        yield from ((slice(top, top + window), slice(left, left + window)) for top, left in product(tops, lefts))


def _log_softmax_in_place(logits: Tensor) -> Tensor:
    """(classes, H, W), of which a photograph of 12 megapixels has gigabytes: in bands of rows, without a copy."""
    for rows in logits.split(64, dim=1):
        rows -= rows.logsumexp(0)
    return logits
