"""Images with a class for every pixel, in the layout for data of one's own or in ADE20K's, checked before training.

In memory a label is a class, counted from 0, or :data:`IGNORED`. A table of 256 entries maps stored values to labels.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from ...errors import UserError, nearest
from ...files.cache import cached_json
from ...files.reading import read_json, read_text, require_data_folder
from ...files.writing import is_encodable
from ..images import UnreadableImage, each_in_threads, open_image, open_stored, stored_size
from ..orientation import Fit, are_stored, fit_of, on_turned
from ..splits import check_holdout, hold_out, require_split, sources_of

__all__ = ["IGNORED", "Pair", "SegmentationData", "Split", "load_pairs"]

T = TypeVar("T")

IGNORED = 255  # the label of pixels that the loss and the metrics leave out
_UNKNOWN = -1
_ADE20K_CLASSES = 150


@dataclass(frozen=True)
class Pair:
    """The file of an image and that of its annotation, a PNG with one channel of 8 bits."""

    image: Path
    annotation: Path
    as_stored: bool = False  # read the image as stored, not turned upright by its EXIF orientation


@dataclass(frozen=True)
class Split:
    pairs: tuple[Pair, ...]
    sizes: tuple[tuple[int, int], ...]  # (H, W) of each image
    class_pixels: tuple[int, ...]  # how many pixels are labelled with each class, over all images


@dataclass(frozen=True)
class SegmentationData:
    classes: tuple[str, ...]
    table: np.ndarray  # (256,) int16: the label of each stored value, or -1 for a value that is not valid
    splits: dict[str, Split]  # train, val and optionally test
    has_one_order: bool  # whether the classes have a fixed order, with or without the file of their names
    unlabelled: tuple[str, ...]  # annotations in which every pixel is ignored
    notices: tuple[str, ...]  # what else the user should know

    def read(self, pair: Pair) -> tuple[Image.Image, np.ndarray]:
        """The image in RGB, and its labels (H, W) uint8.

        Raises:
            UserError: a file has changed since the check, and has a mistake that the check would have found.
        """
        return _read(pair, self.table)


@dataclass(frozen=True)
class _Layout:
    """What a data set holds, as known before its images are opened."""

    classes: tuple[str, ...]
    table: np.ndarray
    folders: dict[str, str]  # the folder of each split
    has_one_order: bool = False  # whether the classes have a fixed order


def _ade20k(root: Path) -> _Layout:
    """images/{training,validation} and annotations/…: a stored 0 is ignored, k is class k - 1.

    The class names are those in objectInfo150.txt, which is a part of the data; without it they are numbers.
    """
    names = [f"class {number}" for number in range(1, _ADE20K_CLASSES + 1)]
    listed = root / "objectInfo150.txt"
    if listed.exists():
        # tab-separated, after a line of headings: number, share, counts, and synonyms, the first of which is the name
        lines = read_text(listed, "data").splitlines()[1:]
        names = [line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip()]
        if len(names) != _ADE20K_CLASSES:
            raise UserError(f"data: got {len(names)} classes in {listed}, expected {_ADE20K_CLASSES}")
    table = np.full(256, _UNKNOWN, dtype=np.int16)
    table[0] = IGNORED
    table[1 : _ADE20K_CLASSES + 1] = np.arange(_ADE20K_CLASSES)
    return _Layout(tuple(names), table, {"train": "training", "val": "validation"}, has_one_order=True)


def _folder(root: Path) -> _Layout:
    """images/{train,val,test}, annotations/… and classes.json: ``{"classes": [names], "ignore_index": 255}``.

    ``ignore_index`` is a stored value or a list of them; the classes take the other values in ascending order.
    """
    listed = root / "classes.json"
    found = read_json(listed, "data", dict)
    classes, ignored = found.get("classes"), found.get("ignore_index", IGNORED)
    names = isinstance(classes, list) and all(isinstance(name, str) and is_encodable(name) for name in classes)
    if not names or not 2 <= len(set(classes)) == len(classes) <= IGNORED:
        raise UserError(f"data: classes in {listed}: got {str(classes)[:80]}, expected 2 to {IGNORED} distinct names")
    values = ignored if isinstance(ignored, list) else [ignored]
    if not all(type(value) is int and 0 <= value <= 255 for value in values):
        expected = "a number from 0 to 255 or a list of them"
        raise UserError(f"data: ignore_index in {listed}: got {repr(ignored)[:80]}, expected {expected}")
    others = [value for value in range(256) if value not in values]
    if len(classes) > len(others):
        got, expected = f"got {256 - len(others)} beside {len(classes)} classes", f"at most {256 - len(classes)}"
        raise UserError(f"data: ignore_index in {listed}: {got}, expected {expected}")
    table = np.full(256, _UNKNOWN, dtype=np.int16)
    table[others[: len(classes)]] = np.arange(len(classes))
    table[values] = IGNORED
    # a test split may come without annotations, and is not used then
    has_test = all((root / kind / "test").is_dir() for kind in ("images", "annotations"))
    optional = {"test": "test"} if has_test else {}
    return _Layout(tuple(classes), table, {"train": "train", "val": "val", **optional})


SOURCES: dict[str, Callable[[Path], _Layout]] = {"folder": _folder, "ade20k": _ade20k, "camvid": _folder}


def load_pairs(data: str, only: str | None = None, holdout: int | None = None) -> SegmentationData:
    """Open ``folder:PATH``, the layout for data of your own (also named ``camvid:PATH``), or ``ade20k:PATH``.

    Every image and annotation is opened once, with a progress bar. The result is kept in the cache folder under a
    checksum of the names, sizes and times of all files, until one of them changes.

    Args:
        only: open this split only; the others may be missing.
        holdout: number of training images to validate on; the data's own val split then becomes test.

    Raises:
        UserError: there is a mistake in the data; the first one is reported with its file. A folder or an annotation
            is missing, a file cannot be read, an annotation differs in size from its image, or holds a value that is
            not a class.
    """
    kind, _, path = data.partition(":")
    if kind not in SOURCES or not path:
        known = [f"{kind}:PATH" for kind in SOURCES]
        raise UserError(f"data: got {data!r}, expected {' or '.join(known)}{nearest(kind, SOURCES)}")
    root = Path(path)
    require_data_folder(root, f"--data {kind}:PATH")
    layout = SOURCES[kind](root)
    check_holdout(holdout, path, "test" in layout.folders)
    sources = {split: source for split, source in sources_of(holdout).items() if source in layout.folders}
    needed = [only] if only else list(sources)
    require_split(path, needed[0], sources)
    opened = dict.fromkeys(sources[split] for split in needed)
    pairs = {source: _find(root, layout.folders[source]) for source in opened}
    found = cached_json(
        f"segmentation/{_checksum(root, layout, pairs)}.json",
        lambda: {source: _check(source, of_source, layout) for source, of_source in pairs.items()},
    )
    notices: list[str] = []
    for source, of_source in pairs.items():
        fits = [fit for *_, fit in found[source]]
        notices += on_turned(source, [pair.image.name for pair in of_source], fits)
        pairs[source] = [replace(pair, as_stored=stored) for pair, stored in zip(of_source, are_stored(fits))]

    def part(split: str) -> Split:
        source = sources[split]
        chosen: Sequence[int] = range(len(pairs[source]))
        if holdout is not None and source == "train":
            chosen = hold_out(holdout, len(chosen))[0 if split == "train" else 1].tolist()
        class_pixels = [0] * len(layout.classes)
        for index in chosen:
            for label, count in found[source][index][2]:
                class_pixels[label] += count
        sizes = [tuple(found[source][index][:2]) for index in chosen]
        return Split(tuple(pairs[source][index] for index in chosen), tuple(sizes), tuple(class_pixels))

    unlabelled = tuple(
        str(pair.annotation)
        for source, of_source in pairs.items()
        for pair, (_, _, counts, _) in zip(of_source, found[source])
        if not counts
    )
    parts = {split: part(split) for split in needed}
    return SegmentationData(layout.classes, layout.table, parts, layout.has_one_order, unlabelled, tuple(notices))


def _find(root: Path, folder: str) -> list[Pair]:
    """Pair images and annotations by name, without hidden files, which file managers leave behind."""
    found = {}
    for kind in ("images", "annotations"):
        inside = root / kind / folder
        if not inside.is_dir():
            raise UserError(f"data: {inside} is not a folder, expected the {kind} of a split")
        found[kind] = sorted(file for file in inside.iterdir() if not file.name.startswith("."))
    images, annotations = found["images"], {file.name: file for file in found["annotations"]}
    if not images:
        raise UserError(f"data: {root / 'images' / folder} is empty, expected images")
    stem, times = Counter(image.stem for image in images).most_common(1)[0]
    if times > 1:
        raise UserError(f"data: {root / 'images' / folder} has {times} images named {stem}, expected one")
    pairs = []
    for image in images:
        annotation = annotations.pop(f"{image.stem}.png", None)
        if annotation is None:
            missing = root / "annotations" / folder / f"{image.stem}.png"
            raise UserError(f"data: {image} has no annotation, expected {missing}")
        pairs.append(Pair(image, annotation))
    for name, annotation in annotations.items():
        image = root / "images" / folder / Path(name).stem
        raise UserError(f"data: {annotation} has no image, expected one named {image}")
    return pairs


def _checksum(root: Path, layout: _Layout, pairs: dict[str, list[Pair]]) -> str:
    digest = hashlib.sha256(b"3")  # the version of the check
    digest.update(layout.table.tobytes())
    for of_split in pairs.values():
        for file in (file for pair in of_split for file in (pair.image, pair.annotation)):
            try:
                state = file.stat()
            except OSError as error:  # such as a broken link
                raise UserError(f"data: {file} is missing ({error.strerror})") from None
            digest.update(os.fsencode(file.relative_to(root)))
            digest.update(f"\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:24]


# H, W, each class that occurs, with its number of pixels, and how the image fits its annotation
_Measured = tuple[int, int, list[tuple[int, int]], Fit]


def _check(split: str, pairs: Sequence[Pair], layout: _Layout) -> list[_Measured]:
    return list(each_in_threads(partial(_measure, table=layout.table), pairs, f"checking {split}"))


def _measure(pair: Pair, table: np.ndarray) -> _Measured:
    fit: Fit = _decode(pair.image, partial(fit_of, size=_decode(pair.annotation, stored_size)))
    _, labels = _read(replace(pair, as_stored=fit == "stored"), table)
    counts = np.bincount(labels.ravel(), minlength=IGNORED + 1)[:IGNORED]
    return *labels.shape, [(int(label), int(counts[label])) for label in np.flatnonzero(counts)], fit


def _read(pair: Pair, table: np.ndarray) -> tuple[Image.Image, np.ndarray]:
    stored = _decode(pair.annotation, open_stored)
    image = _decode(pair.image, partial(open_image, as_stored=pair.as_stored))
    if stored.mode not in ("L", "P"):
        raise UserError(f"data: {pair.annotation}: got Pillow's mode {stored.mode}, expected one channel of 8 bits")
    if stored.size != image.size:
        got, expected = (f"{width}×{height}" for width, height in (stored.size, image.size))
        raise UserError(f"data: {pair.annotation}: got {got} pixels, expected its image's {expected} ({pair.image})")
    values = np.asarray(stored)
    labels = table[values]
    if (unknown := labels == _UNKNOWN).any():
        row, column = (int(positions[0]) for positions in np.nonzero(unknown))
        count, value = int(unknown.sum()), int(values[row, column])
        classes = int(np.count_nonzero((table >= 0) & (table != IGNORED)))
        where = f"{value} in row {row}, column {column} ({count} pixels have no valid label)"
        raise UserError(
            f"data: {pair.annotation}: got the label {where}, expected that of one of the {classes} classes"
        )
    return image, labels.astype(np.uint8)


def _decode(path: Path, decode: Callable[[Path], T]) -> T:
    try:
        return decode(path)
    except UnreadableImage as error:
        raise UserError(f"data: cannot read {path} as an image: {error}") from None
