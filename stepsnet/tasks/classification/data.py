"""The data of classification: two splits of samples, each a function of the seed, the epoch and its index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ...config import Augment
from ...engine.randomness import seed_sample
from ...errors import UserError, nearest
from ..images import UNREADABLE
from .sources import SOURCES, Arrays, StoredImages

__all__ = ["ImageData", "InputSpec", "SampleKey", "Samples", "evaluation_transform", "load_images"]

Transform = Callable[[Any], Tensor]
SampleKey = tuple[int, int, int]  # epoch, index, copy

_NEIGHBORS = 10  # samples that are tried where one cannot be decoded


@dataclass(frozen=True)
class InputSpec:
    """How an image becomes an input: timm's data config of a model."""

    input_size: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875

    @property
    def mode(self) -> str:
        """The mode that Pillow decodes images to."""
        return "L" if self.input_size[0] == 1 else "RGB"

    def training(self, augment: Augment | None) -> Transform:
        """timm's training transform, or that of evaluation where there is no augmentation."""
        if augment is None:
            return self.evaluation()
        from .augmentation import augmenting_transform

        return augmenting_transform(self, augment)

    def evaluation(self) -> Transform:
        """timm's resize, center crop and normalization."""
        from timm.data import create_transform

        return create_transform(
            self.input_size,
            is_training=False,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
        )


class Samples(Dataset):
    """Images as inputs: sample (epoch, index, copy) is a function of these numbers and the seed.

    A sample is the input (C, H, W), its label, and the name of the image that could not be decoded, if there is one:
    it is replaced by the next image that can be.
    """

    def __init__(self, images: StoredImages, transform: Transform, indices: np.ndarray, seed: int = 0):
        self.images, self.transform, self.indices, self.seed = images, transform, indices, seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int, str]:
        """Raises UserError where ten images in a row cannot be decoded."""
        epoch, position, copy = key
        failed = ""
        for step in range(_NEIGHBORS):
            index = int(self.indices[(position + step) % len(self)])
            try:
                image = self.images.read(index)
            except UNREADABLE as error:
                failed = failed or f"{self.images.name(index)}: {' '.join(str(error).split())}"
                continue
            seed_sample(self.seed, epoch, index, copy)
            return self.transform(image), int(self.images.labels[index]), failed
        raise UserError(f"data: {_NEIGHBORS} samples in a row cannot be decoded, the first is {failed}")


@dataclass(frozen=True)
class ImageData:
    classes: tuple[str, ...]
    train: Samples
    val: Samples
    read: Transform  # the same as evaluation_transform


def load_images(
    data: str, spec: InputSpec, augment: Augment | None = None, seed: int = 0, train_samples: int | None = None
) -> ImageData:
    """Open ``digits``, or one of :data:`~stepsnet.tasks.classification.sources.SOURCES` such as ``folder:PATH``.

    A path alone is a folder.

    Args:
        augment: of the training split; None uses the transform of evaluation.
        train_samples: keep so many training samples, the first of each class in turn; None keeps all.

    Raises:
        UserError: an unknown name, a folder that is missing or empty, a class without images, or
            validation classes that differ from training's.
    """
    kind, colon, path = data.partition(":")
    if data == "digits":
        return _digits(seed, augment, train_samples)
    if not colon and Path(data).is_dir():
        kind, path = "folder", data
    if kind not in SOURCES or not path:
        known = ["digits", *(f"{kind}:…" for kind in SOURCES)]
        raise UserError(f"data: got {data!r}, expected a folder or one of {', '.join(known)}{nearest(kind, known)}")
    classes, train, val = SOURCES[kind](path, spec.mode)
    return ImageData(
        classes,
        Samples(train, spec.training(augment), _chosen(train.labels, train_samples), seed),
        Samples(val, spec.evaluation(), np.arange(len(val.labels)), seed),
        evaluation_transform(data, spec),
    )


def evaluation_transform(data: str, spec: InputSpec) -> Transform:
    """A Pillow image of any size and mode -> (C, H, W), normalized, as in the evaluation on ``data``.

    The data are not opened.
    """
    if data == "digits":
        return _digits(0, None, None).read
    transform, mode = spec.evaluation(), spec.mode
    return lambda image: transform(image.convert(mode))


def _chosen(labels: Sequence[int], count: int | None) -> np.ndarray:
    """Indices of all samples, or of the first ``count`` where the classes take turns."""
    if count is None:
        return np.arange(len(labels))
    if not 1 <= count <= len(labels):
        raise UserError(f"train_samples: got {count}, expected 1 to the {len(labels)} training images")
    classes = np.asarray(labels)
    turn = np.empty(len(classes), dtype=np.int64)
    for label in np.unique(classes):
        turn[classes == label] = np.arange(np.count_nonzero(classes == label))
    return np.sort(np.lexsort((classes, turn))[:count])


def _digits(seed: int, augment: Augment | None, train_samples: int | None) -> ImageData:
    """The 1,797 handwritten digits of scikit-learn: 8×8 gray values from 0 to 16, light on dark.

    A fixed fifth of them, stratified by class, is the validation split.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    if augment is not None:
        raise UserError("augment: got some with data=digits, expected null: digits are arrays and not images")
    digits = load()
    images, labels = (digits.images / 16.0).astype(np.float32), digits.target.astype(np.int64)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, val_images, train_labels, val_labels = split
    mean, std = float(train_images.mean()), float(train_images.std())

    def normalize(values: np.ndarray) -> Tensor:
        return torch.from_numpy((values - mean) / std).float().unsqueeze(0)  # (1, 8, 8)

    def read(image: Image.Image) -> Tensor:
        gray = image.convert("L").resize((8, 8), Image.Resampling.BOX)
        return normalize(np.asarray(gray, dtype=np.float32) / 255.0)

    return ImageData(
        tuple(str(digit) for digit in range(10)),
        Samples(Arrays(train_images, train_labels), normalize, _chosen(train_labels, train_samples), seed),
        Samples(Arrays(val_images, val_labels), normalize, np.arange(len(val_labels)), seed),
        read,
    )
