"""Image data sets by name, each as two splits of samples that know nothing of what was drawn before them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ..engine.console import counted
from ..engine.randomness import seed_sample
from ..errors import UserError, nearest
from .digits import load_digits
from .held_out import UNREADABLE, Arrays, InMemory, divide, split_of
from .settings import Augment
from .shards import find_shards

__all__ = ["ImageData", "InputSpec", "UNREADABLE", "Place", "Samples", "load_images", "read_to_predict"]

T = TypeVar("T")

Transform = Callable[[Any], Tensor]
Place = tuple[int, int, int]  # epoch, index, copy

_NEIGHBOURS = 10  # samples tried in the place of one that cannot be decoded


@dataclass(frozen=True)
class InputSpec:
    """How a picture becomes an input: timm's data config of a model."""

    input_size: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875

    @property
    def mode(self) -> str:
        """Pillow's."""
        return "L" if self.input_size[0] == 1 else "RGB"

    def training(self, augment: Augment | None) -> Transform:
        from timm.data import create_transform

        if augment is None:
            return self.evaluation()
        return create_transform(
            self.input_size,
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter,
            auto_augment=augment.auto_augment,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            re_prob=augment.re_prob,
            re_mode=augment.re_mode,
        )

    def evaluation(self) -> Transform:
        from timm.data import create_transform

        return create_transform(
            self.input_size,
            is_training=False,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
        )


class Pictures(Protocol):
    """One split as it is stored."""

    @property
    def labels(self) -> Sequence[int]: ...

    def read(self, index: int) -> Any:
        """A picture; raises what Pillow raises when it cannot be decoded."""
        ...

    def name(self, index: int) -> str: ...


class Samples(Dataset):
    """Pictures as inputs: sample (epoch, index, copy) is a function of these and the seed.

    One that cannot be decoded gives way to the next one that can; the third item of a sample then names it.
    """

    def __init__(self, pictures: Pictures, transform: Transform, indices: np.ndarray, seed: int = 0):
        self.pictures, self.transform, self.indices, self.seed = pictures, transform, indices, seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Place) -> tuple[Tensor, int, str]:
        epoch, position, copy = place
        failed = ""
        for step in range(_NEIGHBOURS):
            index = int(self.indices[(position + step) % len(self)])
            try:
                picture = self.pictures.read(index)
            except UNREADABLE as error:
                failed = failed or f"{self.pictures.name(index)}: {' '.join(str(error).split())}"
                continue
            seed_sample(self.seed, epoch, index, copy)
            return self.transform(picture), int(self.pictures.labels[index]), failed
        raise UserError(f"data: {_NEIGHBOURS} samples in a row cannot be decoded, the first is {failed}")


@dataclass(frozen=True)
class ImageData:
    classes: tuple[str, ...]
    train: Samples
    val: Samples  # what is evaluated
    read: Transform  # a Pillow picture of any size -> (C, H, W), normalised, as in evaluation
    clean: Samples  # training images as in evaluation, perhaps none
    evaluated: str  # which split ``val`` is


class _Files:
    """Pictures in files, labelled by their folder."""

    def __init__(self, samples: Sequence[tuple[str, int]], mode: str):
        self.paths = [path for path, _ in samples]
        self.labels = [label for _, label in samples]
        self.mode = mode

    def read(self, index: int) -> Image.Image:
        return open_picture(Path(self.paths[index]), self.mode)

    def name(self, index: int) -> str:
        return self.paths[index]


class _TimmReader:
    """Pictures that one of timm's readers finds."""

    def __init__(self, reader: Any, mode: str):
        self.reader, self.mode = reader, mode
        self.labels = [int(target) for target in reader.iter_targets()]

    def read(self, index: int) -> Image.Image:
        with self.reader[index][0] as file, Image.open(file) as picture:
            return picture.convert(self.mode)

    def name(self, index: int) -> str:
        return f"sample {index} ({self.reader.filename(index, basename=True)})"


def read_to_predict(files: Sequence[Path], read: Callable[[Path], T]) -> Iterator[T]:
    """What ``read`` makes of each file, one at a time; all are read before the first is given out.

    Raises:
        UserError: a file that is missing or no picture; it is named, and none has been given out.
    """
    for file in counted(files, "reading"):
        _read_picture(file, read)
    for file in counted(files, "predicting"):
        yield _read_picture(file, read)


def _read_picture(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except UNREADABLE as error:
        reason = "no such file" if not file.exists() else str(error).split(":")[0]
        raise UserError(f"predict: cannot read {file} as a picture: {reason}") from None


def open_picture(path: Path, mode: str) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert(mode)


Splits = tuple[tuple[str, ...], Pictures, Pictures]  # classes, training, validation


def _folder(place: str, mode: str) -> Splits:
    """``train`` and ``val`` (or validation, test), in each a folder of pictures a class: ImageNet's layout."""
    from torchvision.datasets import ImageFolder

    root = Path(place)
    if not root.is_dir():
        raise UserError(f"data: {place} is no folder; --data folder:PATH says where the pictures are")
    splits = []
    for names in (("train",), ("val", "validation", "valid", "test")):
        found = next((root / name for name in names if (root / name).is_dir()), None)
        if found is None:
            inside = ", ".join(sorted(path.name for path in root.iterdir())[:5]) or "nothing"
            raise UserError(f"data: {root} has no folder {' or '.join(names)}, got {inside}")
        try:
            splits.append(ImageFolder(str(found)))
        except FileNotFoundError as error:
            raise UserError(f"data: {str(error).split(' Supported')[0].rstrip('.')} in {found}") from None
    train, val = splits
    if train.classes != val.classes:
        missing, more = sorted(set(train.classes) - set(val.classes)), sorted(set(val.classes) - set(train.classes))
        raise UserError(
            f"data: {val.root} has other classes than {train.root}: {len(missing)} are missing"
            f"{f' ({missing[0]}, …)' if missing else ''}, {len(more)} are new{f' ({more[0]}, …)' if more else ''}"
        )
    return tuple(train.classes), _Files(train.samples, mode), _Files(val.samples, mode)


def _cifar(name: Literal["CIFAR10", "CIFAR100"]) -> Callable[[str, str], Splits]:
    def load(place: str, mode: str) -> Splits:
        from torchvision import datasets

        def convert(array: np.ndarray) -> Image.Image:
            return Image.fromarray(array).convert(mode)

        kind = getattr(datasets, name)
        try:
            # every rank may ask at once: what is there is only read
            splits = [kind(place, train=train, download=not os.path.isdir(place)) for train in (True, False)]
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"data: no {name} as torchvision reads it in {place}, nor could it be loaded: {error}"
            ) from None
        train, val = splits
        return (
            tuple(train.classes),
            Arrays(train.data, train.targets, convert),
            Arrays(val.data, val.targets, convert),
        )

    return load


def _hugging_face(place: str, mode: str) -> Splits:
    """A data set of the hub, or of a local folder, with the splits train and validation (or test)."""
    try:
        from timm.data.readers import create_reader

        readers = [create_reader(f"hfds/{place}", root=None, split="train")]
    except ImportError:
        raise UserError("data: hfds needs Hugging Face's datasets, expected `pip install stepsnet[data]`") from None
    except Exception as error:  # what the hub, the network or the files may raise
        raise UserError(f"data: cannot load hfds:{place}: {' '.join(str(error).split())[:300]}") from None
    for split in ("validation", "test"):
        try:
            readers.append(create_reader(f"hfds/{place}", root=None, split=split))
            break
        except ValueError:
            continue
    else:
        raise UserError(f"data: hfds:{place} has no split validation or test")
    train, val = readers
    if train.class_to_idx != val.class_to_idx:
        raise UserError(f"data: hfds:{place}: the classes of its splits differ")
    return tuple(map(str, train.class_to_idx)), _TimmReader(train, mode), _TimmReader(val, mode)


SOURCES: dict[str, Callable[[str, str], Splits]] = {
    "folder": _folder,
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "hfds": _hugging_face,
    "wds": find_shards,
}


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
) -> ImageData:
    """A data set by its name: ``digits``, or a kind of :data:`SOURCES` and a place, such as ``folder:PATH``.

    A path alone is a folder. The split that is evaluated is the one to validate on, or that behind an ``@``:
    ``folder:PATH@train``. The samples are divided by :func:`divide`.

    Args:
        in_memory: decode the pictures once and keep them.

    Raises:
        UserError: an unknown name, a folder that is missing or empty, a class without pictures, validation
            classes that differ from training's, or a part that the data do not have.
    """
    data, split = split_of(data)
    kind, colon, place = data.partition(":")
    if data == "digits":
        (classes, train, other), training, evaluation, read = load_digits(augment)
    else:
        if not colon and Path(data).is_dir():
            kind, place = "folder", data
        if kind not in SOURCES or not place:
            known = ["digits", *(f"{kind}:…" for kind in SOURCES)]
            raise UserError(f"data: got {data!r}, expected a folder or one of {', '.join(known)}{nearest(kind, known)}")
        classes, train, other = SOURCES[kind](place, spec.mode)
        training, evaluation, mode = spec.training(augment), spec.evaluation(), spec.mode
        read = lambda picture: evaluation(picture.convert(mode))  # noqa: E731
    parts = divide(train.labels, len(other.labels), split, train_samples, holdout, clean_samples)
    if in_memory and not isinstance(train, Arrays):
        seen = parts.train if split == "val" else parts.train[:0]  # what is only scored is not trained on
        train = InMemory(train, np.concatenate((seen, parts.evaluated)) if parts.of_training else seen)
        other = other if parts.of_training else InMemory(other, parts.evaluated)
    return ImageData(
        classes,
        Samples(train, training, parts.train, seed),
        Samples(train if parts.of_training else other, evaluation, parts.evaluated, seed),
        read,
        Samples(train, evaluation, parts.clean, seed),
        parts.name,
    )
