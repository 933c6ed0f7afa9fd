"""mIoU, mAcc and pixel accuracy, from counts of (true class, predicted class)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["most_common_class", "scores"]


def scores(confusion: Tensor) -> tuple[dict[str, float], list[float | None]]:
    """mIoU, mAcc and pixel accuracy in percent, and the IoU of each class.

    A class that is neither in the annotations nor predicted has no IoU, and one that is not in the annotations has no
    accuracy; the means are over the other classes.

    Args:
        confusion: numbers of pixels, (true class, predicted class).
    """
    pixels = confusion.double()
    right, true, predicted = pixels.diagonal(), pixels.sum(1), pixels.sum(0)
    iou = 100 * right / (true + predicted - right)  # 0/0 is nan
    accuracy = 100 * right / true
    means = {"miou": iou.nanmean(), "macc": accuracy.nanmean(), "pixel_accuracy": 100 * right.sum() / pixels.sum()}
    of_class = [None if value != value else round(value, 4) for value in iou.tolist()]
    return {name: round(value.item(), 4) for name, value in means.items()}, of_class


def most_common_class(confusion: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """The class of most pixels, and the :func:`scores` of predicting it everywhere, which a model has to beat."""
    true = confusion.sum(1)
    everywhere = torch.zeros_like(confusion)
    everywhere[:, true.argmax()] = true
    return {"name": classes[int(true.argmax())], **scores(everywhere)[0]}
