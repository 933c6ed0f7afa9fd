"""scikit-learn's handwritten digits, which come with every installation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .sources import Arrays, Splits

__all__ = ["data_config", "load_digits"]

Transform = Callable[[Any], Tensor]


def load_digits() -> tuple[Splits, Transform, Transform]:
    """The 1,797 handwritten digits that scikit-learn ships: 8×8 gray values from 0 to 16, light on dark.

    A fixed fifth, stratified by class, is the second split.

    Returns:
        The classes and both splits; the transform of their images; and the function that turns a Pillow image of any
        size into an input, (1, 8, 8).
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    digits = load()
    images, labels = (digits.images / 16.0).astype(np.float32), digits.target.astype(np.int64)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, val_images, train_labels, val_labels = split
    mean, std = float(train_images.mean()), float(train_images.std())

    normalize = partial(_normalized, mean, std)  # which can be pickled

    def read(image: Image.Image) -> Tensor:
        gray = image.convert("L").resize((8, 8), Image.Resampling.BOX)
        return normalize(np.asarray(gray, dtype=np.float32) / 255.0)

    classes = tuple(str(digit) for digit in range(10))
    splits = Splits(classes, Arrays(train_images, train_labels), Arrays(val_images, val_labels))
    return splits, normalize, read


def _normalized(mean: float, std: float, values: np.ndarray) -> Tensor:
    return torch.from_numpy((values - mean) / std).float().unsqueeze(0)  # (1, 8, 8)


def data_config() -> dict[str, Any]:
    """How :func:`load_digits` turns an image into an input, in timm's terms."""
    images = cast(Arrays, load_digits()[0].train).images
    mean, std = (float(images.mean()),), (float(images.std()),)
    return {"mean": mean, "std": std, "interpolation": "box", "crop_pct": 1.0, "crop_mode": "squash"}
