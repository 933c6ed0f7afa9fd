"""WebDataset shards, read in any order: each tar file is indexed once, and its images are read on demand.

timm's own reader streams a shard from its beginning, so its order depends on the number of workers and it cannot
start inside an epoch. A run that is resumed bit for bit needs the n-th sample (design.md, rule 4).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from ...errors import UserError
from ...files.reading import read_text, require_data_folder
from ...output.terminal import counted
from ..images import UnreadableImage, image_shape, image_suffixes, open_image

__all__ = ["Shards", "find_shards"]

_MOST_CLASSES = 1_000_000  # a label that is not below this is taken for a mistyped number


class Shards:
    """The images of tar files whose members are ``KEY.jpg`` (or png, webp, …) and ``KEY.cls`` or ``KEY.json``.

    ``.cls`` holds the number of the class; ``.json`` has it under ``label``. Members of other kinds are left out.
    """

    def __init__(self, paths: Sequence[Path], mode: str, missing: str = ""):
        """Raises UserError for a file that is damaged or not a tar file, and for an image without a class."""
        self.mode, self.missing = mode, missing
        self.labels: list[int] = []
        self.members: list[tuple[Path, str, int, int]] = []  # file, name, offset and length in bytes
        self.unread: list[str] = []  # images whose suffix follows a second dot
        for path in paths:
            self._index(path)

    @property
    def left_out(self) -> str:
        if not self.unread:
            return ""
        images = counted(len(self.unread), "image")
        return (
            f"left out {images} such as {self.unread[0]}: a key ends at the first dot, and the rest is no image suffix"
        )

    def _index(self, path: Path) -> None:
        images: dict[str, tuple[str, int, int]] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as tar:  # uncompressed: a compressed file has no offsets
                for member in tar:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    key, suffix = f"{folder}/{stem}", suffix.lower()
                    if f".{suffix}" in image_suffixes():
                        if key in images:
                            both = f"{images[key][0]} and {member.name}"
                            raise UserError(f"data: {path}: got two images for one key, {both}, expected one")
                        if not member.isfile():
                            raise UserError(f"data: {path}: {member.name} is a link, expected an image")
                        images[key] = (member.name, member.offset_data, member.size)
                    elif suffix in ("cls", "json") and (file := tar.extractfile(member)):
                        label = _label(file.read(), suffix, f"{path}: {member.name}")
                        if label is not None and labels.setdefault(key, label) != label:
                            both = f"{labels[key]} and {label}"
                            raise UserError(f"data: {path}: {key.lstrip('/')} has the classes {both}, expected one")
                    elif Path(name).suffix.lower() in image_suffixes():
                        self.unread.append(member.name)
                _check_end(path, tar.offset)
        except (OSError, tarfile.TarError, ValueError, KeyError) as error:
            raise UserError(f"data: cannot read {path} as a WebDataset shard: {error}") from None
        for key, image in images.items():
            if key not in labels:
                raise UserError(f"data: {path}: {image[0]} has no class, expected {key.lstrip('/')}.cls with a number")
            self.members.append((path, *image))
            self.labels.append(labels[key])
        for key in labels:
            if key not in images:
                raise UserError(
                    f"data: {path}: {key.lstrip('/')} has a class but no image, "
                    f"expected an image such as {key.lstrip('/')}.jpg"
                )

    def read(self, index: int) -> Image.Image:
        """Raises UnreadableImage if the image cannot be decoded."""
        return open_image(self._content(index), self.mode)

    def shape(self, index: int) -> tuple[int, int, int]:
        return image_shape(self._content(index))

    def _content(self, index: int) -> io.BytesIO:
        path, _, offset, size = self.members[index]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return io.BytesIO(file.read(size))
        except OSError as error:
            raise UnreadableImage(error.strerror or str(error)) from None

    def name(self, index: int) -> str:
        path, member, *_ = self.members[index]
        return f"{path}:{member}"


def _label(content: bytes, suffix: str, where: str) -> int | None:
    """The class in a ``.cls`` or ``.json`` member; None for JSON without one."""
    try:
        label = int(content) if suffix == "cls" else json.loads(content).get("label")
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"data: {where}: got {content[:40]!r}, expected the number of a class") from None
    if label is not None and not (type(label) is int and 0 <= label < _MOST_CLASSES):
        raise UserError(f"data: {where}: got the class {label!r}, expected 0 to {_MOST_CLASSES - 1:,}")
    return label


def _check_end(path: Path, offset: int) -> None:
    """Raises UserError unless the archive ends where its members do: tarfile stops silently at a damaged header."""
    with path.open("rb") as file:
        file.seek(offset)
        rest = file.read(_MARK)
        if len(rest) < _MARK:
            raise UserError(f"data: {path} has no end-of-archive mark, expected a whole tar file; it may be cut off")
        while rest:
            if rest.strip(b"\0"):
                raise UserError(f"data: {path} is damaged at byte {offset:,}, expected a member or the archive's end")
            offset += len(rest)
            rest = file.read(1 << 20)


_MARK = 2 * tarfile.BLOCKSIZE  # two blocks of zeros
_SPLITS = {"train": "train(ing)?", "val": "val(id(ation)?)?", "test": "test(ing)?"}


def _is_of(path: Path, split: str) -> bool:
    return bool(re.search(f"(?<![a-z])({_SPLITS[split]})(?![a-z])", str(path), re.IGNORECASE))


def find_shards(folder: str, mode: str) -> tuple[tuple[str, ...], Shards, Shards, Callable[[], Shards] | None]:
    """Classes, training split and validation split of a folder of ``*train*.tar`` and ``*val*.tar`` files.

    The fourth item is a function that opens the test split, or None if there is no such split besides. The names may
    also be those of folders. If nothing is named val or validation, test is the validation split. Only a separate word
    counts: ``latest`` is not a test split. The lines of ``classnames.txt`` name the classes; without this file, their
    numbers do.

    Args:
        mode: the Pillow mode that images are converted to.

    Raises:
        UserError: a split is missing, a file is compressed or belongs to both splits, or the classes do not fit.
    """
    root = Path(folder)
    require_data_folder(root, "--data wds:PATH")
    tars = sorted(root.rglob("*.tar"))
    if compressed := sorted(path for suffix in ("gz", "bz2", "xz", "zst") for path in root.rglob(f"*.tar.{suffix}")):
        raise UserError(f"data: {compressed[0]} is compressed, expected .tar, which can be read at any position")
    by_name = {name: [path for path in tars if _is_of(path.relative_to(root), name)] for name in _SPLITS}
    if both := set(by_name["train"]) & {*by_name["val"], *by_name["test"]}:
        raise UserError(f"data: {min(both)} is named as training and as validation, expected one of them")
    train = Shards(by_name["train"], mode)
    if not train.labels:
        raise UserError(f"data: no images in *train*.tar under {root}")
    evaluated = by_name["val"] or by_name["test"]
    no_val = f"data: no images in *val*.tar or *test*.tar under {root}"
    val = Shards(
        evaluated, mode, missing="" if evaluated else f"{no_val}; a recipe with holdout=N validates on N of train"
    )
    if evaluated and not val.labels:
        raise UserError(no_val)
    count = max(train.labels) + 1
    if max(val.labels, default=0) >= count:
        raise UserError(f"data: {root} has class {max(val.labels)} in validation, expected training's 0 to {count - 1}")
    names_file = root / "classnames.txt"
    classes = read_text(names_file, "data").splitlines() if names_file.exists() else [str(i) for i in range(count)]
    if len(classes) < count:
        raise UserError(f"data: {names_file} has {len(classes)} lines, expected one for each of the {count} classes")
    has_test = by_name["val"] and by_name["test"]
    return tuple(classes), train, val, partial(Shards, by_name["test"], mode) if has_test else None
