"""WebDataset shards, read in any order: each tar file is indexed once, and its images are read on demand.

timm's own reader streams a shard from its beginning, so its order depends on the number of workers and it cannot
start inside an epoch. A run that is resumed bit for bit needs the n-th sample (design.md, rule 4).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ...errors import UserError

__all__ = ["Shards", "find_shards"]

_SUFFIXES = {"jpg", "jpeg", "png", "webp", "ppm"}


class Shards:
    """The images of tar files whose members are ``KEY.jpg`` (or png, webp, …) and ``KEY.cls`` or ``KEY.json``.

    ``.cls`` holds the number of the class; ``.json`` has it under ``label``.
    """

    def __init__(self, paths: Sequence[Path], mode: str):
        """Raises UserError for a file that is not a tar file, and for an image without a class."""
        self.mode = mode
        self.labels: list[int] = []
        self.members: list[tuple[Path, str, int, int]] = []  # file, name, offset and length in bytes
        for path in paths:
            self._index(path)

    def _index(self, path: Path) -> None:
        images: dict[str, tuple[str, int, int]] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as tar:  # uncompressed: a compressed file has no offsets
                for member in tar:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    key = f"{folder}/{stem}"
                    if suffix.lower() in _SUFFIXES:
                        images[key] = (member.name, member.offset_data, member.size)
                    elif suffix in ("cls", "json") and (file := tar.extractfile(member)):
                        text = file.read()
                        label = int(text) if suffix == "cls" else json.loads(text).get("label")
                        if label is not None:
                            labels[key] = int(label)
        except (OSError, tarfile.TarError, ValueError, AttributeError) as error:
            raise UserError(f"data: cannot read {path} as a WebDataset shard: {error}") from None
        for key, image in images.items():
            if labels.get(key, -1) < 0:
                raise UserError(f"data: {path}: {image[0]} has no class, expected {key.lstrip('/')}.cls with a number")
            self.members.append((path, *image))
            self.labels.append(labels[key])

    def read(self, index: int) -> Image.Image:
        path, _, offset, size = self.members[index]
        with path.open("rb") as file:
            file.seek(offset)
            content = io.BytesIO(file.read(size))
        with Image.open(content) as image:
            return image.convert(self.mode)

    def name(self, index: int) -> str:
        path, member, *_ = self.members[index]
        return f"{path}:{member}"


_SPLITS = {"train": "train(ing)?", "val": "val(id(ation)?)?", "test": "test(ing)?"}


def _is_of(path: Path, split: str) -> bool:
    return bool(re.search(f"(?<![a-z])({_SPLITS[split]})(?![a-z])", str(path), re.IGNORECASE))


def find_shards(folder: str, mode: str) -> tuple[tuple[str, ...], Any, Any]:
    """Classes, training split and validation split of a folder of ``*train*.tar`` and ``*val*.tar`` files.

    The names may be those of folders too. Where nothing is named val or validation, test is the validation split.
    Only a separate word counts: ``latest`` is not a test split. The lines of ``classnames.txt`` name the classes;
    without this file they are named by their numbers.

    Args:
        mode: Pillow's mode that images are converted to.

    Raises:
        UserError: a split is missing, a file belongs to both, or the classes do not fit.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"data: {folder} is not a folder, expected --data wds:PATH")
    tars = sorted(root.rglob("*.tar"))
    by_name = {name: [path for path in tars if _is_of(path.relative_to(root), name)] for name in _SPLITS}
    if both := set(by_name["train"]) & {*by_name["val"], *by_name["test"]}:
        raise UserError(f"data: {min(both)} is named as training and as validation, expected one of them")
    train = Shards(by_name["train"], mode)
    if not train.labels:
        raise UserError(f"data: no images in *train*.tar under {root}")
    val = Shards(by_name["val"] or by_name["test"], mode)
    if not val.labels:
        raise UserError(f"data: no images in *val*.tar or *test*.tar under {root}")
    count = max(train.labels) + 1
    if max(val.labels) >= count:
        raise UserError(f"data: {root} has class {max(val.labels)} in validation, expected training's 0 to {count - 1}")
    names_file = root / "classnames.txt"
    classes = names_file.read_text("utf-8").splitlines() if names_file.exists() else [str(i) for i in range(count)]
    if len(classes) < count:
        raise UserError(f"data: {names_file} has {len(classes)} lines, expected one for each of the {count} classes")
    return tuple(classes), train, val
