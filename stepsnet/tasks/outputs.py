"""The files that `stepsnet predict` writes: below one folder, which mirrors the folders of the inputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..files.own_files import LIST, OwnFiles

__all__ = ["Outputs", "common_folder", "without_outputs"]

_LONGEST_NAME = 255  # bytes; the limit of nearly every file system


def common_folder(places: Sequence[Path]) -> Path:
    """The deepest folder that contains all of these places, or is one of them."""
    return Path(os.path.commonpath([os.path.abspath(place) for place in places]))


def without_outputs(files: Sequence[Path]) -> list[Path]:
    """The files that stepsnet did not write itself, according to the lists in the folders above them."""
    folders = {parent for file in files for parent in file.absolute().parents}
    known = {folder: OwnFiles(folder) for folder in folders if (folder / LIST).exists()}
    return [
        file
        for file in files
        if not any(known[parent].has(file.absolute()) for parent in file.absolute().parents if parent in known)
    ]


class Outputs:
    """Paths for the results of input files; none of them replaces a file that somebody else has put there.

    A file that stepsnet wrote may be replaced, if it has not been changed since.
    """

    def __init__(self, folder: Path, root: Path, force: bool = False):
        """
        Args:
            folder: where the files are written.
            root: the folder that ``folder`` mirrors: the results of a file in ``root/a`` are in ``folder/a``.
            force: replace what is there, but never an input.
        """
        self.folder, self.root, self.force = folder, root, force
        self.own = OwnFiles(folder)

    def paths(self, files: Sequence[Path], ending: str) -> list[Path]:
        """A path for each file: its own path relative to the root, with ``ending`` in place of its suffix.

        Files that differ only in their suffix keep it: ``a.jpg`` and ``a.png`` get ``a.jpg.png`` and ``a.png.png``.
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
        """Check that these paths may be written, before the block writes them.

        Raises:
            UserError: a name is too long, a path is an input, or, without ``force``, a path already exists and is not
                as stepsnet wrote it.
        """
        given = {os.path.realpath(file) for file in inputs}
        for path in paths:
            if (length := len(os.fsencode(path.name))) > _LONGEST_NAME:
                raise UserError(f"predict: {path.name} has {length} bytes, expected a name of at most {_LONGEST_NAME}")
            if os.path.realpath(path) in given:
                raise UserError(f"predict: {path} is an input, expected another folder for --out")
            if os.path.lexists(path) and not self.force and not self.own.has(path):
                raise UserError(
                    f"predict: {path} was not written by stepsnet, was changed since, or is from an earlier version; "
                    "--force replaces it"
                )
        try:
            yield self
        finally:
            self.own.settle()

    def write(self, path: Path, content: str | bytes) -> None:
        self.own.write(path, content.encode() if isinstance(content, str) else content)
