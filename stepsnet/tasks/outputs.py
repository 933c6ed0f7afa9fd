"""The files that `stepsnet predict` writes: below one folder, which mirrors those of the inputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..own_files import LIST, OwnFiles

__all__ = ["Outputs", "common_folder", "without_outputs"]

_LONGEST_NAME = 255  # bytes, of a file on nearly every file system


def common_folder(places: Sequence[Path]) -> Path:
    """The deepest folder that all of these are in, or are."""
    return Path(os.path.commonpath([os.path.abspath(place) for place in places]))


def without_outputs(files: Sequence[Path]) -> list[Path]:
    """The files that stepsnet has not written itself, into whatever folder above them."""
    folders = {parent for file in files for parent in file.absolute().parents}
    known = {folder: OwnFiles(folder) for folder in folders if (folder / LIST).exists()}
    return [
        file
        for file in files
        if not any(known[parent].has(file.absolute()) for parent in file.absolute().parents if parent in known)
    ]


class Outputs:
    """Paths for the results of input files, none of which takes the place of what somebody else has put there.

    A file that stepsnet wrote, and that is still as it was written, may be replaced.
    """

    def __init__(self, folder: Path, root: Path, force: bool = False):
        """
        Args:
            folder: where the files are written.
            root: the folder that it mirrors: a file in ``root/a`` has its results in ``folder/a``.
            force: replace what is there, but never an input.
        """
        self.folder, self.root, self.force = folder, root, force
        self.own = OwnFiles(folder)

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
        """Check that these may be written, before the block writes them.

        Raises:
            UserError: one of them has too long a name, is an input, or is there and is not what stepsnet wrote, and
                ``force`` is not given.
        """
        given = {os.path.realpath(file) for file in inputs}
        for path in paths:
            if (length := len(os.fsencode(path.name))) > _LONGEST_NAME:
                raise UserError(f"predict: {path.name} has {length} bytes, expected a name of at most {_LONGEST_NAME}")
            if os.path.realpath(path) in given:
                raise UserError(f"predict: {path} is an input, expected another folder for --out")
            if os.path.lexists(path) and not self.force and not self.own.has(path):
                raise UserError(
                    f"predict: {path} was not written by stepsnet, or was changed since, or is of an earlier version; "
                    "--force replaces it"
                )
        try:
            yield self
        finally:
            self.own.settle()

    def write(self, path: Path, content: str | bytes) -> None:
        self.own.write(path, content.encode() if isinstance(content, str) else content)
