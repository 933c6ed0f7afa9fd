"""The files that `stepsnet predict` writes: below one folder, which mirrors those of the inputs."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..files import write_atomically
from ..reading import read_json

__all__ = ["Outputs", "common_folder", "without_outputs"]

_INDEX = ".stepsnet-written.json"  # in the folder: the checksum of each file that was written there
_LONGEST_NAME = 255  # bytes, of a file on nearly every file system


def common_folder(places: Sequence[Path]) -> Path:
    """The deepest folder that all of these are in, or are."""
    return Path(os.path.commonpath([os.path.abspath(place) for place in places]))


def without_outputs(files: Sequence[Path]) -> list[Path]:
    """The files that predict has not written itself, into whatever folder above them."""
    folders = {parent for file in files for parent in file.absolute().parents}
    known = {folder: Outputs(folder, folder) for folder in folders if (folder / _INDEX).exists()}
    return [
        file
        for file in files
        if not any(known[parent].wrote(file.absolute()) for parent in file.absolute().parents if parent in known)
    ]


class Outputs:
    """Paths for the results of input files, none of which takes the place of what somebody else has put there.

    A file that predict wrote, and that is still as it was written, may be replaced.
    """

    def __init__(self, folder: Path, root: Path, force: bool = False):
        """
        Args:
            folder: where the files are written.
            root: the folder that it mirrors: a file in ``root/a`` has its results in ``folder/a``.
            force: replace what is there, but never an input.
        """
        self.folder, self.root, self.force = folder, root, force
        self.written = self._read_index()

    def paths(self, files: Sequence[Path], ending: str) -> list[Path]:
        """A path for each file: its own, relative to the root, with another ending in the place of its suffix.

        Files of one name and several suffixes keep these: ``a.jpg`` and ``a.png`` get ``a.jpg.png`` and ``a.png.png``.
        """
        relative = [Path(os.path.relpath(os.path.abspath(file), self.root)) for file in files]
        without = [file.with_suffix("") for file in relative]
        times = Counter(without)
        names = [file if times[bare] > 1 else bare for file, bare in zip(relative, without)]
        if len(set(names)) < len(names):  # such as a.jpg, a.png and a.png.jpg
            names = relative
        return [self.folder / name.with_name(name.name + ending) for name in names]

    @contextmanager
    def reserved(self, paths: Sequence[Path], inputs: Sequence[Path] = ()) -> Iterator[Outputs]:
        """Check that these may be written, before the block writes them; behind it they are known as ours.

        Raises:
            UserError: one of them has too long a name, is an input, or is there and is not what predict wrote, and
                ``force`` is not given.
        """
        given = {os.path.realpath(file) for file in inputs}
        for path in paths:
            if (length := len(os.fsencode(path.name))) > _LONGEST_NAME:
                raise UserError(f"predict: {path.name} has {length} bytes, expected a name of at most {_LONGEST_NAME}")
            if os.path.realpath(path) in given:
                raise UserError(f"predict: {path} is an input, expected another folder for --out")
            if os.path.lexists(path) and not self.force and not self.wrote(path):
                raise UserError(f"predict: {path} is there, and predict did not write it; --force replaces it")
        before = dict(self.written)
        try:
            yield self
        finally:
            if self.written != before:
                write_atomically(self.folder / _INDEX, json.dumps(self._read_index() | self.written, indent=1) + "\n")

    def write(self, path: Path, content: str | bytes) -> None:
        write_atomically(path, content)
        data = content.encode() if isinstance(content, str) else content
        self.written[self._name(path)] = hashlib.sha256(data).hexdigest()

    def wrote(self, path: Path) -> bool:
        """Whether predict wrote this file, and it is as it was written."""
        checksum = self.written.get(self._name(path))
        try:
            return checksum is not None and hashlib.sha256(path.read_bytes()).hexdigest() == checksum
        except OSError:
            return False

    def _name(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.folder)).as_posix()

    def _read_index(self) -> dict[str, str]:
        try:
            return read_json(self.folder / _INDEX, "predict", dict)
        except UserError:  # none yet, or none that can be read: nothing is known as ours
            return {}
