"""Where the images of classification come from: folders, CIFAR, Hugging Face's data sets and WebDataset shards."""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np
from filelock import FileLock
from PIL import Image

from ...errors import UserError, in_a_line
from ...files.reading import require_data_folder
from ...output.terminal import counted
from ...settings.consent import DOWNLOADING, is_half_downloaded
from ..hub import HubName, columns_of, load_hub
from ..images import UnreadableImage, find_images, image_shape, image_suffixes, open_image
from .shards import find_shards

__all__ = ["SOURCES", "Arrays", "Splits", "StoredImages", "register_source"]


class StoredImages(Protocol):
    """One split as it is stored."""

    @property
    def labels(self) -> Sequence[int]: ...

    def read(self, index: int) -> Any:
        """An image; raises :class:`~stepsnet.tasks.images.UnreadableImage` if it cannot be decoded."""
        ...

    def name(self, index: int) -> str:
        """What an image is called in messages."""
        ...

    # Three more members are optional. ``shape(index)`` is (channels, height, width), with one channel for an image that
    # is stored in greyscale; it serves to look at images without decoding them. ``left_out`` is a line that the user is
    # shown before training and with scores outside of it. ``missing`` says why there are no images to train on, or none
    # to validate on.


class Splits(NamedTuple):
    classes: tuple[str, ...]
    train: StoredImages  # empty if the data are for evaluation only
    val: StoredImages  # empty, with ``missing``, if there is only a training split, which ``holdout`` divides
    test: Callable[[], StoredImages] | None = None  # one of its own, which is opened only for DATA@test


Source = Callable[[str, str], Splits]  # called with a path and a Pillow mode


class Arrays:
    """Images in memory."""

    def __init__(self, images: Any, labels: Sequence[int], convert: Callable[[Any], Any] | None = None):
        self.images, self.labels, self.convert = images, labels, convert

    def read(self, index: int) -> Any:
        return self.convert(self.images[index]) if self.convert else self.images[index]

    def name(self, index: int) -> str:
        return f"sample {index}"

    def shape(self, index: int) -> tuple[int, int, int]:
        height, width, *channels = self.images[index].shape
        return (*channels, height, width) if channels else (1, height, width)


class _Files:
    """Image files, labelled by their folder."""

    def __init__(self, by_class: Mapping[str, Sequence[Path]], mode: str, left_out: str = "", missing: str = ""):
        self.paths = [path for images in by_class.values() for path in images]
        self.labels = [label for label, images in enumerate(by_class.values()) for _ in images]
        self.mode, self.left_out, self.missing = mode, left_out, missing

    def read(self, index: int) -> Image.Image:
        return open_image(self.paths[index], self.mode)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def shape(self, index: int) -> tuple[int, int, int]:
        return image_shape(self.paths[index])


class _OfHub:
    """A split of a data set of the Hugging Face hub."""

    def __init__(self, rows: Any, split: str, image: str, labels: str, mode: str):
        """Raises UserError for a class that is null."""
        from datasets import Image as ImageColumn

        self.split, self.image, self.mode = split, image, mode
        self.labels = list(rows[labels])
        if None in self.labels:
            where = f"sample {self.labels.index(None)} of {split}"
            most = rows.features[labels].num_classes - 1
            raise UserError(f"data: got null as the class of {where}, expected 0 to {most}")
        self.rows = rows.select_columns([image]).cast_column(image, ImageColumn(decode=False))

    def read(self, index: int) -> Image.Image:
        with self._file(index) as file:
            return open_image(file, self.mode)

    def name(self, index: int) -> str:
        path = (self.rows[index][self.image] or {}).get("path")
        return f"sample {index} ({Path(path).name})" if path else f"sample {index}"

    def shape(self, index: int) -> tuple[int, int, int]:
        with self._file(index) as file:
            return image_shape(file)

    @contextmanager
    def _file(self, index: int) -> Iterator[IO[bytes]]:
        """Open an image's file. Raises UnreadableImage if there is nothing to open."""
        cell = self.rows[index][self.image] or {}  # null is None
        content, path = cell.get("bytes"), cell.get("path") or ""
        if not (content or path):
            raise UnreadableImage("the data have neither its bytes nor its path")
        try:
            content = content or Path(path).read_bytes()
        except OSError as error:
            raise UnreadableImage(error.strerror or str(error)) from None
        with io.BytesIO(content) as file:
            yield file


_EVALUATED = ("val", "validation", "valid", "test")  # names of the folder, the first that is found
_OR_HELD_OUT = "; a recipe with holdout=N validates on N training images, and DATA@train scores them all"


def _folder(path: str, mode: str) -> Splits:
    """Folders ``train`` and ``val`` (or validation, valid, test), with a folder of images per class: ImageNet's layout.

    The classes are the folders in ``train``, even empty ones; ``val`` need not have all of them. Hidden folders, which
    notebooks and file managers leave behind, do not count. ``test`` besides both is a split of its own if it has class
    folders: without them, its images have no labels. Without ``train``, the classes are the folders of ``val``. There
    is nothing to train on then, nor if all class folders in ``train`` are empty. Class folders alone, without a folder
    for each split, are all for training.
    """
    root = Path(path)
    require_data_folder(root, "--data folder:PATH")
    first = root if (alone := _has_classes_alone(root)) else _split_folder(root, "train", *_EVALUATED)
    val_root = next((root / name for name in _EVALUATED if _is_split(root / name)), None)
    of_first, test_root = _images_by_class(first), root / "test"
    by_class, left_out = of_first
    if alone:
        read_as = f"{root} has no folder train: all of its {len(by_class)} folders are read as classes to train on"
        left_out = "; ".join([read_as, *[left_out] * bool(left_out)])

    def evaluated(split: Path) -> _Files:
        found, left_out = of_first if split == first else _images_by_class(split)
        if not any(found.values()):
            raise UserError(_no_images(split))
        if new := [name for name, images in found.items() if images and name not in by_class]:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            raise UserError(
                f"data: {split / new[0]}{more}: got images of a class that has no folder in {first}, expected the "
                "same folders in both"
            )
        return _Files({name: found.get(name, []) for name in by_class}, mode, left_out)

    if val_root is None:
        missing = _no_folder(root, *_EVALUATED) + _OR_HELD_OUT
        return Splits(tuple(by_class), _Files(by_class, mode, left_out), _Files({}, mode, missing=missing))
    has_test = val_root != test_root and _is_split(test_root)
    test = partial(evaluated, test_root) if has_test else None
    if first != val_root:
        train = _Files(by_class, mode, left_out, missing="" if any(by_class.values()) else _no_images(first))
    else:
        train = _Files({}, mode, missing=_no_folder(root, "train"))
    return Splits(tuple(by_class), train, evaluated(val_root), test)


def _has_classes_alone(root: Path) -> bool:
    """Whether there are at least two folders, all with images directly in them, and none that is named as a split."""
    folders = _class_folders(root)
    if len(folders) < 2 or any(folder.name in ("train", *_EVALUATED) for folder in folders):
        return False
    return all(any(file.suffix.lower() in image_suffixes() for file in folder.iterdir()) for folder in folders)


def _class_folders(split: Path) -> list[Path]:
    return sorted(path for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_split(folder: Path) -> bool:
    """Whether the folder exists and is a split: ``test`` without class folders has images without labels."""
    return folder.is_dir() and (folder.name != "test" or bool(_class_folders(folder)))


def _split_folder(root: Path, *names: str) -> Path:
    found = next((root / name for name in names if _is_split(root / name)), None)
    if found is None:
        raise UserError(_no_folder(root, *names))
    return found


def _no_folder(root: Path, *names: str) -> str:
    inside = ", ".join(sorted(path.name for path in root.iterdir())[:5]) or "nothing"
    is_unlabelled = "test" in names and (root / "test").is_dir()
    names = tuple(f"{name} with class folders" if name == "test" and is_unlabelled else name for name in names)
    return f"data: {root} has no folder {' or '.join(names)}, got {inside}"


def _no_images(split: Path) -> str:
    return f"data: found no images in {split}, expected some for each class"


def _images_by_class(split: Path) -> tuple[dict[str, list[Path]], str]:
    """The images of each class folder, both in alphabetical order, and a line about the other files."""
    folders = _class_folders(split)
    if not folders:
        raise UserError(f"data: {split} has no folders, expected one for each class")
    found: dict[str, list[Path]] = {}
    all_others: list[Path] = []
    for folder in folders:
        found[folder.name], others = find_images(folder)
        if others and not found[folder.name]:  # in formats that are not read
            got = f"other files ({_kinds_of(others)})"
            raise UserError(f"data: found no images for the class {folder.name} in {split}, got {got}")
        all_others += others
    loose = sum(path.suffix.lower() in image_suffixes() and _is_seen_file(path) for path in split.iterdir())
    left_out = [f"{counted(len(all_others), 'file')} ({_kinds_of(all_others)})"] if all_others else []
    left_out += [f"{counted(loose, 'image')} beside the class folders"] if loose else []
    return found, f"left out {' and '.join(left_out)} in {split.name}" if left_out else ""


def _is_seen_file(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_file()


def _kinds_of(files: Sequence[Path]) -> str:
    """The first five of their suffixes."""
    return ", ".join(sorted({path.suffix.lower() or path.name for path in files})[:5])


def _picture(mode: str, array: np.ndarray) -> Image.Image:
    return Image.fromarray(array).convert(mode)


def _cifar(name: Literal["CIFAR10", "CIFAR100"]) -> Callable[[str, str], Splits]:
    def load(path: str, mode: str) -> Splits:
        from torchvision import datasets

        kind = getattr(datasets, name)
        try:
            # in this order: if another rank makes the folder in between, it has its mark already
            if not os.path.isdir(path) or is_half_downloaded(path):
                _download(kind, Path(path))
            train, val = (kind(path, train=train) for train in (True, False))
        except (RuntimeError, OSError, EOFError) as error:
            raise UserError(
                f"data: {path} has no {name} in torchvision's format ({in_a_line(error)}); it is downloaded if the "
                "folder does not exist"
            ) from None
        convert = partial(_picture, mode)  # which can be pickled
        return Splits(
            tuple(train.classes),
            Arrays(train.data, train.targets, convert),
            Arrays(val.data, val.targets, convert),
        )

    return load


def _download(kind: Any, folder: Path) -> None:
    """Download a torchvision data set, only once if several ranks come at the same time.

    A file marks the folder from before it appears until it is complete, so a download that was cut off is recognized,
    and files that a user has put into a folder are never replaced. The lock is another file, beside the folder: a rank
    that has waited for it finds no mark once the first rank is done.
    """
    from torchvision.datasets.utils import download_and_extract_archive

    if not folder.is_dir():
        beside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        beside.mkdir(parents=True)
        (beside / DOWNLOADING).touch()
        try:
            beside.rename(folder)
        except OSError:  # another rank was faster
            shutil.rmtree(beside)
    lock = folder.with_name(f".{folder.name}.lock")
    with FileLock(lock, fallback_to_soft=False):  # a soft lock's file would outlive a process that is killed
        if is_half_downloaded(folder):
            if not (folder / kind.base_folder).exists():  # else the user has put it there since
                parts = folder / f"{DOWNLOADING}.parts"
                shutil.rmtree(parts, ignore_errors=True)
                download_and_extract_archive(kind.url, folder, parts, kind.filename, kind.tgz_md5)
                (parts / kind.base_folder).rename(folder / kind.base_folder)
                shutil.rmtree(parts)
            try:
                kind(folder, train=False)
            except (RuntimeError, OSError, EOFError):  # the mark stays
                raise UserError(
                    f"data: {folder / kind.base_folder} is incomplete; remove it to have it downloaded again"
                ) from None
            (folder / DOWNLOADING).unlink()
    lock.unlink(missing_ok=True)


def _hugging_face(path: str, mode: str) -> Splits:
    """A data set from the hub or from a local folder, with the splits train and validation (or test).

    ``NAME:CONFIG:COLUMN`` says which column has the labels. If there is a validation split, test is not read: on the
    hub, its labels are often hidden.
    """
    asked = HubName.of(path)
    rows = load_hub(asked, "train")
    if rows is None:
        raise UserError(f"data: hfds:{path} has no split train, expected train and validation or test")
    image, labels = _columns(path, rows.features, asked.column)
    classes, train = rows.features[labels].names, _OfHub(rows, "train", image, labels, mode)
    for split in ("validation", "test"):
        if (rows := load_hub(asked, split)) is not None:
            if rows.features[labels].names != classes:
                raise UserError(f"data: hfds:{path} has other classes in {split} than in train, expected the same")
            return Splits(tuple(classes), train, _OfHub(rows, split, image, labels, mode))
    missing = f"data: hfds:{path} has only the split train, expected validation or test too{_OR_HELD_OUT}"
    return Splits(tuple(classes), train, _Files({}, mode, missing=missing))


def _columns(path: str, features: Mapping[str, Any], labels: str) -> tuple[str, str]:
    """The image and label columns: the one so named, else the only one of its type."""

    def column(kind: str, name: str, alone: bool, hint: str = "") -> str:
        of_kind = [other for other, feature in features.items() if type(feature).__name__ == kind]
        if name not in of_kind and not (alone and len(of_kind) == 1):
            got = columns_of(features)
            raise UserError(f"data: hfds:{path}: got the columns {got}, expected {name}: {kind}{hint}")
        return name if name in of_kind else of_kind[0]

    hint = " (class_encode_column makes one, and hfds:NAME::COLUMN names it)"
    return column("Image", "image", True), column("ClassLabel", labels or "label", not labels, hint)


def _shards(path: str, mode: str) -> Splits:
    return Splits(*find_shards(path, mode))


SOURCES: dict[str, Source] = {
    "folder": _folder,
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "hfds": _hugging_face,
    "wds": _shards,
}
_OWN = frozenset({"digits", *SOURCES})


def register_source(kind: str) -> Callable[[Source], Source]:
    """A decorator that adds a kind of data, ``KIND:PATH``, from a user's module.

    The function is given what follows the colon, and the mode of the images: "RGB", or "L" for a model with one
    channel. It returns the class names, the two splits, whose images are Pillow images in that mode, and, if there is a
    test split besides, a function that opens it. A kind that was registered before is replaced.

    Raises:
        ValueError: the kind is empty, is one of stepsnet's own, or has a colon or an @ in it.
    """
    if kind in _OWN or not kind or set(kind) & set(":@"):
        raise ValueError(f"register_source: got {kind!r}, expected a name without : and @ that is not stepsnet's own")

    def register(open_source: Source) -> Source:
        SOURCES[kind] = open_source
        return open_source

    return register
