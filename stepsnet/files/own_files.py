"""Files that we write into a user's folder, known by their checksums, so that nobody else's are replaced.

``.stepsnet.sha256`` in that folder lists them, as ``sha256sum --check`` reads it. A file that is not listed there, or
has changed since, is not ours. Each file is listed before it is written, so that it is known as ours whenever the
process is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UserError
from .writing import write_atomically

__all__ = ["LIST", "NotOurFile", "OwnFiles", "write_own_files"]

LIST = ".stepsnet.sha256"

_UNESCAPED = {"n": "\n", "r": "\r"}


class NotOurFile(UserError):
    """A file that would be replaced was not written by this program, or was changed since."""


def write_own_files(
    folder: Path,
    contents: Mapping[str, bytes],
    outdated: Iterable[str] = (),
    *,
    force: bool = False,
    how_to_replace: str = "",
) -> None:
    """Write files, and remove those of an earlier call that are outdated.

    Args:
        contents: contents by name in ``folder``, such as ``figures/loss.png``; they are written in this order.
        outdated: names of files that are removed if they are ours.
        force: replace others' files too.
        how_to_replace: how the user can have that done, for the message about a file that is not replaced.

    Raises:
        NotOurFile: a file of one of these names is somebody else's; nothing is written then.
        UserError: a file cannot be written.
    """
    with _alone_in(folder):
        _write_own_files(folder, contents, outdated, force, how_to_replace)


class OwnFiles:
    """Our files in a folder and below it, for a caller that writes one after the other."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._ours = _read(folder)
        self._written: dict[str, set[str]] = {}

    def has(self, path: Path) -> bool:
        """Whether a file is ours, and still as it was written."""
        ours = self._ours.get(self._name(path))  # looked up first, since others' files may be many and large
        return ours is not None and _sum_of(path) in ours

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, whatever is there. Raises UserError if it cannot be written."""
        name, sums = self._name(path), {hashlib.sha256(content).hexdigest()}
        with _alone_in(self.folder):
            _append(self.folder, {name: sums})
        write_atomically(path, content)
        self._ours[name] = self._written[name] = sums

    def settle(self) -> None:
        """List each file that was written with its last checksum alone."""
        if self._written:
            with _alone_in(self.folder):
                _write(self.folder, _read(self.folder) | self._written)

    def _name(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.folder)).as_posix()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for any other process that writes own files there, if the file system can lock a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_own_files(
    folder: Path, contents: Mapping[str, bytes], outdated: Iterable[str], force: bool, how_to_replace: str
) -> None:
    ours = _read(folder)
    there = {name: _sum_of(folder / name) for name in (*contents, *outdated)}
    new = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def is_ours(name: str) -> bool:
        return there[name] in (None, new.get(name)) or there[name] in ours.get(name, set())

    if not force and (name := next((name for name in contents if not is_ours(name)), None)):
        replaces = f" ({how_to_replace} replaces it)" if how_to_replace else ""
        raise NotOurFile(
            f"{folder / name} was not written by stepsnet, or was changed since, or is from an earlier version; "
            f"choose another place, or move that file away{replaces}"
        )
    gone = [name for name in outdated if there[name] and is_ours(name)]
    # wherever this process is killed, each file on the disk has one of these checksums
    _write(folder, ours | {name: ours.get(name, set()) | {new[name]} for name in new})
    for name, content in contents.items():
        if there[name] != new[name]:
            write_atomically(folder / name, content)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    kept = {name: sums for name, sums in ours.items() if name not in gone}
    _write(folder, kept | {name: {new[name]} for name in new})


def _sum_of(path: Path) -> str | None:
    """The checksum of a file; None if there is nothing, and "", which no file has, for what cannot be read."""
    if not os.path.lexists(path):
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except OSError:
        return ""


def _read(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    try:
        lines = os.fsdecode((folder / LIST).read_bytes()).split("\n")
    except OSError:
        return {}
    for line in lines:
        checksum, _, name = line.removeprefix("\\").partition("  ")
        if line.startswith("\\"):
            name = re.sub(r"\\(.)", lambda escape: _UNESCAPED.get(escape[1], escape[1]), name)
        if name:
            found.setdefault(name, set()).add(checksum)
    return found


def _write(folder: Path, sums: Mapping[str, set[str]]) -> None:
    write_atomically(folder / LIST, _lines(sums))


def _append(folder: Path, sums: Mapping[str, set[str]]) -> None:
    try:
        with (folder / LIST).open("ab") as file:
            file.write(_lines(sums))
    except OSError as error:
        raise UserError(f"cannot write {folder / LIST}: {error.strerror or error}") from error


def _lines(sums: Mapping[str, set[str]]) -> bytes:
    return os.fsencode("".join(_line(name, checksum) for name in sorted(sums) for checksum in sorted(sums[name])))


def _line(name: str, checksum: str) -> str:
    """A line of the list. As in sha256sum's, a backslash in front says that the name is escaped."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{checksum}  {escaped}\n"
