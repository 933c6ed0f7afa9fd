"""The data of classification: two splits of samples, each a function of the seed, the epoch and its index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...engine.randomness import seed_sample
from ...errors import UserError, nearest
from ...settings.config import Augment
from ..class_names import distinct
from ..images import UnreadableImage, pixels_allowed
from ..splits import split_of
from .digits import load_digits
from .held_out import InMemory, divide
from .sources import SOURCES, Arrays, Splits, StoredImages
from .transforms import InputSpec, Transform, before_normalization, normalized

__all__ = [
    "ImageData",
    "SampleKey",
    "Samples",
    "StoredData",
    "check_test_split",
    "check_trainable",
    "check_validated",
    "evaluation_transform",
    "load_images",
    "open_images",
]

SampleKey = tuple[int, int, int]  # epoch, index, copy

_NO_TEST = (
    "data: {data} has no test split: with holdout, runs are validated on training images, and there are no others"
)
_NEIGHBORS = 9  # training samples that are tried in place of one that cannot be decoded


class Samples(Dataset):
    """Images as inputs: sample (epoch, index, copy) is a function of these numbers and the seed.

    They are read in batches, which takes less time than one by one and gives the same samples. In training, an image
    that cannot be decoded is replaced by the next one that can; in evaluation it is left out.

    Args:
        indices: the images to take, by their index in ``images``.
        neighbors: how many images after one that cannot be decoded are tried in its place.
    """

    def __init__(
        self, images: StoredImages, transform: Transform, indices: np.ndarray, seed: int = 0, neighbors: int = 0
    ):
        self.images, self.transform, self.indices, self.seed = images, transform, indices, seed
        self.neighbors, self.in_two = neighbors, before_normalization(transform)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def labels(self) -> np.ndarray:
        return np.asarray(self.images.labels, dtype=np.int64)[self.indices]

    def batch(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, list[str]]:
        """Inputs (B, C, H, W) and labels (B) of the images that could be decoded, and for each key what could not be.

        The last is a text with the image's name and the reason; it is empty if there was no failure.

        Raises:
            UserError: there are neighbors, and none of them can be decoded either.
        """
        transform, normalize = self.in_two or (self.transform, None)
        images, labels, failed = zip(*(self._read(key, transform) for key in keys))
        decoded = [(image, label) for image, label in zip(images, labels) if image is not None]
        if not decoded:
            return torch.zeros(1, 0, 0, 0), torch.zeros(0, dtype=torch.int64), list(failed)
        images, labels = zip(*decoded)
        inputs = normalized(images, normalize) if normalize else torch.stack(images)
        return inputs, torch.from_numpy(np.asarray(labels, dtype=np.int64)), list(failed)

    __getitems__ = batch  # under this name, torch's loader asks for whole batches and never for single samples

    def _read(self, key: SampleKey, transform: Callable[[Any], Any]) -> tuple[Any, int, str]:
        """The transformed image, or None; its label; and the name of what could not be decoded, with the reason."""
        epoch, position, copy = key
        failed = ""
        for step in range(1 + self.neighbors):
            index = int(self.indices[(position + step) % len(self)])
            try:
                image = self.images.read(index)
            except UnreadableImage as error:
                failed = failed or f"{self.images.name(index)}: {error}"
                continue
            seed_sample(self.seed, epoch, index, copy)
            with pixels_allowed():
                return transform(image), int(self.images.labels[index]), failed
        if not self.neighbors:
            return None, int(self.images.labels[self.indices[position]]), failed
        raise UserError(f"data: {1 + self.neighbors} samples in a row cannot be decoded, the first is {failed}")


@dataclass(frozen=True)
class ImageData:
    classes: tuple[str, ...]
    train: Samples
    val: Samples  # those that are evaluated
    read: Transform  # the same as evaluation_transform
    clean: Samples  # training images as in evaluation; may be empty
    evaluated: str  # which split ``val`` is
    in_folders: bool  # one folder for each class


@dataclass(frozen=True)
class StoredData:
    """A data set that has been opened: its files are listed, but no image is decoded."""

    name: str  # without the split
    splits: Splits  # to be read in color

    def in_mode(self, mode: str) -> Splits:
        return self.splits if mode == "RGB" or self.name == "digits" else _open_source(self.name, mode)


def open_images(data: str) -> StoredData:
    """Open what :func:`load_images` reads; raises UserError as it does."""
    name, _ = split_of(data)
    return StoredData(name, load_digits()[0] if name == "digits" else _open_source(name, "RGB"))


def check_trainable(data: str, train: StoredImages) -> None:
    """Raises UserError if there is nothing to train on."""
    if not len(train.labels):
        why = getattr(train, "missing", "")
        raise UserError(why or f"data: {data} has no images in its training split, expected some to train on")


def check_validated(data: str, val: StoredImages) -> None:
    """Raises UserError if there is nothing to validate on."""
    if not len(val.labels):
        why = getattr(val, "missing", "")
        raise UserError(why or f"data: {data} has no images in its validation split, expected some to validate on")


def check_test_split(opened: StoredData, holdout: int | None) -> None:
    """Raises UserError if there is no ``DATA@test``, or it cannot be opened. No image is decoded."""
    if holdout is not None and not len(opened.splits.val.labels):
        raise UserError(_NO_TEST.format(data=opened.name))
    if opened.splits.test and holdout is None:
        opened.splits.test()
    elif holdout is None:
        raise UserError(
            f"score_test: got true, but {opened.name} has no test split besides the one to validate on; expected "
            "holdout=N, which validates on N training images and leaves that split for the end"
        )


def load_images(
    data: str,
    spec: InputSpec,
    augment: Augment | None = None,
    seed: int = 0,
    train_samples: int | None = None,
    *,
    holdout: int | None = None,
    clean_samples: int = 0,
    in_memory: bool = False,
    for_training: bool = True,
    opened: StoredData | None = None,
) -> ImageData:
    """Open ``digits``, or one of :data:`~stepsnet.tasks.classification.sources.SOURCES` such as ``folder:PATH``.

    A path alone is a folder. The split that is evaluated is the one to validate on, or the one named after an ``@``:
    ``folder:PATH@train``.

    Args:
        augment: augmentation of the training split; None uses the transform of evaluation.
        train_samples: how many training samples to keep, taken from each class in turn; None keeps all.
        holdout: how many training images to validate on; the other split is then ``DATA@test``. Not allowed if the data
            have a test split of their own.
        clean_samples: how many training images to evaluate too.
        in_memory: decode the images once and keep them.
        for_training: False if the data are only evaluated, and may have fewer training images than these numbers, or
            none.
        opened: the data, if they have been opened already.

    Raises:
        UserError: the name is unknown, a folder is missing or empty, validation has classes that training does not
            have, or there are fewer samples than asked for.
    """
    data, split = split_of(data)
    if data == "digits":
        if spec.input_size != (1, 8, 8):
            got = "×".join(map(str, spec.input_size))
            raise UserError(
                f"data: digits are 1×8×8 values, got a model with {got} inputs, expected model.args.in_chans=1 and "
                "model.args.img_size=8, or null for both, and img_size=data"
            )
        if augment is not None:
            raise UserError("augment: got settings with data=digits, expected null: digits are arrays, not images")
        (classes, train, other, own_test), training, _ = load_digits()
        evaluation = training
    else:
        classes, train, other, own_test = (opened or open_images(data)).in_mode(spec.mode)
        training, evaluation = spec.training(augment), spec.evaluation()
    if own_test and split == "test" and holdout is None:
        other = own_test()
    elif split == "test" and holdout is not None and not len(other.labels):
        raise UserError(_NO_TEST.format(data=data))
    elif split == "val" and holdout is None:
        check_validated(data, other)
    if for_training or split == "train" or (split == "val" and holdout is not None):
        check_trainable(data, train)
    has_test = own_test is not None
    numbers = (train_samples, holdout, clean_samples)
    parts = divide(train.labels, len(other.labels), split, *numbers, has_test, for_training)
    if in_memory and not isinstance(train, Arrays):
        trained_on = parts.train if for_training else parts.train[:0]
        train = InMemory(train, np.union1d(trained_on, parts.evaluated) if parts.of_training else trained_on)
        other = other if parts.of_training else InMemory(other, parts.evaluated)
    return ImageData(
        tuple(distinct(classes)),
        Samples(train, training, parts.train, seed, _NEIGHBORS),
        Samples(train if parts.of_training else other, evaluation, parts.evaluated, seed),
        evaluation_transform(data, spec),
        Samples(train, evaluation, parts.clean, seed),
        parts.name,
        _kind_and_path(data)[0] == "folder",
    )


def evaluation_transform(data: str, spec: InputSpec) -> Transform:
    """The transform of evaluation on ``data``: a Pillow image of any size, in an 8-bit mode -> (C, H, W), normalized.

    The data are not opened.
    """
    if split_of(data)[0] == "digits":
        return load_digits()[2]
    transform, mode = spec.evaluation(), spec.mode
    return lambda image: transform(image.convert(mode))


def _open_source(data: str, mode: str) -> Splits:
    kind, path = _kind_and_path(data)
    if kind not in SOURCES or not path:
        known = ["digits", *(f"{kind}:…" for kind in SOURCES)]
        raise UserError(f"data: got {data!r}, expected a folder or one of {', '.join(known)}{nearest(kind, known)}")
    try:
        splits = SOURCES[kind](path, mode)
    except OSError as error:  # from a user's function; those here report it themselves
        raise UserError(f"data: {data}: {error.strerror or error}") from None
    return _checked(kind, splits)


def _kind_and_path(data: str) -> tuple[str, str]:
    kind, colon, path = data.partition(":")
    return ("folder", data) if not colon and Path(data).is_dir() else (kind, path)


def _checked(kind: str, splits: Any) -> Splits:
    """The splits. Raises UserError if a source, perhaps a user's, does not return what training needs."""
    if not isinstance(splits, tuple) or len(splits) not in (3, len(Splits._fields)):
        raise UserError(f"data: {kind}: got {type(splits).__name__} from its function, expected Splits")
    splits = Splits(*splits)
    classes = len(splits.classes)
    for name, images in (("train", splits.train), ("val", splits.val)):
        _checked_images(kind, name, images, classes)
        if name == "val" and not len(images.labels) and not getattr(images, "missing", ""):
            raise UserError(f"data: {kind}: got no images in {name}, expected at least one")
    if not (splits.test is None or callable(splits.test)):
        raise UserError(f"data: {kind}: got {type(splits.test).__name__} as test, expected a function that opens it")
    if open_test := splits.test:
        return splits._replace(test=lambda: _checked_images(kind, "test", open_test(), classes))
    return splits


def _checked_images(kind: str, name: str, images: Any, classes: int) -> Any:
    labels = getattr(images, "labels", None)
    if labels is None or not callable(getattr(images, "read", None)):
        raise UserError(f"data: {kind}: got {type(images).__name__} as {name}, expected images with labels and read")
    found = np.asarray(labels)
    expected = f"the numbers of its {classes} classes, from 0"
    if len(found) and found.dtype.kind not in "iu":
        raise UserError(f"data: {kind}: got labels such as {str(found[0])[:40]!r} in {name}, expected {expected}")
    if len(found) and not 0 <= found.min() <= found.max() < classes:
        raise UserError(f"data: {kind}: got labels from {found.min()} to {found.max()} in {name}, expected {expected}")
    return images
