"""Image classification: data sets, cross-entropy, and top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..engine.randomness import data_order
from ..errors import UserError, nearest

__all__ = ["Classification", "ImageArrays", "load_images"]


@dataclass(frozen=True)
class ImageArrays:
    """A small data set held in memory: both splits, and how a picture becomes an input."""

    classes: tuple[str, ...]
    train_images: Tensor  # (N, C, H, W), normalised
    train_labels: Tensor  # (N,)
    val_images: Tensor
    val_labels: Tensor
    read: Callable[[Image.Image], Tensor]  # a picture of any size -> (C, H, W), normalised


def load_digits() -> ImageArrays:
    """The 1,797 handwritten digits that scikit-learn ships: 8×8 grey values from 0 to 16, light on dark.

    A fixed fifth, stratified by class, is the validation split.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    digits = load()
    images, labels = (digits.images / 16.0).astype(np.float32), digits.target.astype(np.int64)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, val_images, train_labels, val_labels = split
    mean, std = float(train_images.mean()), float(train_images.std())

    def normalise(values: np.ndarray) -> Tensor:
        return torch.from_numpy((values - mean) / std).float().unsqueeze(-3)  # (…, 1, 8, 8)

    def read(picture: Image.Image) -> Tensor:
        grey = picture.convert("L").resize((8, 8), Image.Resampling.BOX)
        return normalise(np.asarray(grey, dtype=np.float32) / 255.0)

    return ImageArrays(
        classes=tuple(str(digit) for digit in range(10)),
        train_images=normalise(train_images),
        train_labels=torch.from_numpy(train_labels),
        val_images=normalise(val_images),
        val_labels=torch.from_numpy(val_labels),
        read=read,
    )


DATA: dict[str, Callable[[], ImageArrays]] = {"digits": load_digits}


def load_images(name: str) -> ImageArrays:
    """Raises UserError for a data set that is not known."""
    if name not in DATA:
        raise UserError(f"data: got {name!r}, expected one of {', '.join(DATA)}{nearest(name, DATA)}")
    return DATA[name]()


class Classification:
    """The task: each epoch visits the training images once, in an order of (seed, epoch)."""

    def __init__(self, data: ImageArrays, batch_size: int, label_smoothing: float, seed: int):
        if not 1 <= batch_size <= len(data.train_images):
            expected = f"1 to the {len(data.train_images)} training images"
            raise UserError(f"batch_size: got {batch_size}, expected {expected}")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.steps_per_epoch = len(data.train_images) // batch_size  # the last, smaller batch is dropped

    def batches(self, epoch: int, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(data_order(self.seed, epoch, len(self.data.train_images)))
        for number in range(start, self.steps_per_epoch):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield self.data.train_images[chosen].to(device), self.data.train_labels[chosen].to(device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)  # (B, classes)
        top1 = (logits.argmax(-1) == labels).float().mean() * 100
        return self.criterion(logits, labels), {"top1": top1}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        loss, top1, top5 = 0.0, 0, 0
        for images, labels in zip(self.data.val_images.split(256), self.data.val_labels.split(256)):
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]  # (B, 5)
            top1 += int(ranked[:, 0].sum())
            top5 += int(ranked.any(-1).sum())
        count = len(self.data.val_labels)
        return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
