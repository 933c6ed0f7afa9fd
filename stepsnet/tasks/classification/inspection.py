"""What a report shows of a classifier: which classes it confuses, and the images with the highest loss."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...run_folder.inspection import Confusion, Picture, Pictures, Section, Table
from ..pictures import as_picture
from .data import Samples

__all__ = ["Mistakes"]

_MOST_IN_A_MATRIX = 30  # classes; if there are more, the pairs that are confused most often are listed
_PAIRS, _PICTURES = 15, 12


class _Judged(NamedTuple):
    """One image; compares by its loss."""

    loss: float
    position: int  # in the evaluated samples
    label: int
    likeliest: int
    of_label: float  # the label's probability
    of_likeliest: float


@dataclass
class Mistakes:
    """Counts of (class, predicted class), and the images with the highest loss; small, however much is evaluated."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    worst: list[_Judged] = field(default_factory=list)

    def update(self, indices: Sequence[int], logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (B, classes) and labels (B) of the samples at ``indices``."""
        losses = nn.functional.cross_entropy(logits, labels, reduction="none").nan_to_num(nan=math.inf, posinf=math.inf)
        chances = logits.softmax(-1)
        best = chances.max(-1)
        of_label = chances.gather(-1, labels[:, None])[:, 0]
        columns = (losses, torch.as_tensor(list(indices)), labels, best.indices, of_label, best.values)
        rows = [_Judged(*row) for row in zip(*(column.tolist() for column in columns))]
        self.counts.update((row.label, row.likeliest) for row in rows)
        self.worst = heapq.nlargest(_PICTURES, (*self.worst, *rows))

    def sections(self, classes: Sequence[str], samples: Samples) -> list[Section]:
        """What the report shows; the images are read again from ``samples``."""
        confused = self._matrix(classes) if len(classes) <= _MOST_IN_A_MATRIX else self._pairs(classes)
        pictures = [_picture(row, classes, samples) for row in self.worst]
        about = f"The {len(pictures)} evaluated images on which the loss is highest, the highest first."
        return [*confused, *([Pictures("Images with the highest loss", about, pictures)] if pictures else [])]

    def _matrix(self, classes: Sequence[str]) -> list[Section]:
        numbers = range(len(classes))
        return [Confusion(list(classes), [[self.counts[true, taken] for taken in numbers] for true in numbers])]

    def _pairs(self, classes: Sequence[str]) -> list[Section]:
        of_class = Counter[int]()
        for (true, _), count in self.counts.items():
            of_class[true] += count
        wrong = [(count, pair) for pair, count in self.counts.items() if pair[0] != pair[1]]
        most = sorted(wrong, key=lambda entry: (-entry[0], entry[1]))[:_PAIRS]
        rows = [
            [classes[true], classes[taken], str(count), str(of_class[true]), f"{100 * count / of_class[true]:.1f}%"]
            for count, (true, taken) in most
        ]
        about = f"The {len(rows)} pairs of classes that are confused most often, of {len(classes)} classes."
        columns = ["class", "taken for", "images", "of", "share"]
        return [Table("Most confused classes", about, columns, rows)] if rows else []


def _picture(row: _Judged, classes: Sequence[str], samples: Samples) -> Picture:
    index = int(samples.indices[row.position])
    title = f"{classes[row.label]}, taken for {classes[row.likeliest]}"
    if row.label == row.likeliest:
        title = f"{classes[row.label]}, which is right"
    chances = f"{classes[row.likeliest]} {100 * row.of_likeliest:.1f}%"
    if row.label != row.likeliest:
        chances += f", {classes[row.label]} {100 * row.of_label:.1f}%"
    name = "/".join(Path(samples.images.name(index)).parts[-2:])
    return as_picture(_as_image(samples.images.read(index)), title, f"{chances}; loss {row.loss:.2f}; {name}")


def _as_image(stored: Any) -> Image.Image:
    """Sources hold images, or arrays with values in 0 … 1."""
    if isinstance(stored, Image.Image):
        return stored
    return Image.fromarray((255 * np.clip(stored, 0, 1)).round().astype(np.uint8))
