"""The user's cache: what is computed once for a data set or a tokenizer, with its checksum.

``settings/consent.py`` keeps in it what the user has asked to be fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import UserError
from ..output.terminal import say
from .writing import LOCKLESS, write_atomically

__all__ = ["cache_folder", "cached_json", "locked_entry", "say_damaged"]


def cache_folder() -> Path:
    """The cache: ``STEPSNET_CACHE``, or else ``~/.cache/stepsnet``.

    A user without a home directory, as in some containers, gets one of their own among the temporary files.

    Raises:
        UserError: that temporary folder belongs to somebody else.
    """
    if named := os.environ.get("STEPSNET_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "stepsnet"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"stepsnet-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise UserError(f"cache: {folder} is somebody else's; set STEPSNET_CACHE to another folder") from None
        return folder


def cached_json(name: str, compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` returns, as JSON reads it back. It is called once; a second process waits for the first.

    A damaged entry is computed again, and a line says so. A cache that already has its entries may be read-only.

    Args:
        name: the name of the file in :func:`cache_folder`.

    Raises:
        UserError: the folder cannot be written. What ``compute`` raises is passed on; then nothing is cached.
    """
    path = cache_folder() / name
    found = _read_entry(path)
    if found is None:
        with locked_entry(path):
            found = _read_entry(path)  # another process may have written it meanwhile
            if found is None:
                say_damaged(path)
                found = json.dumps(compute())
                write_atomically(path, f"{_checksum(found)}\n{found}")
    return json.loads(found)


@contextmanager
def locked_entry(path: Path) -> Iterator[None]:
    """Hold the lock of an entry of the cache while it is written.

    Raises:
        UserError: the cache cannot be written, or its disk has no locks that the operating system releases.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a soft lock would be a mere file, which a killed process leaves behind for good
        lock = FileLock(f"{path}.lock", fallback_to_soft=False)
        lock.acquire()
    except OSError as error:
        reason = "its disk has no locks (flock)" if error.errno in LOCKLESS else error.strerror or error
        raise UserError(f"cannot write {path.parent}: {reason}; set STEPSNET_CACHE to another folder") from None
    try:
        yield
    finally:
        lock.release()


def say_damaged(entry: Path) -> None:
    """Say on stderr that an entry of the cache cannot be used, if there is one."""
    if entry.exists():
        say(f"stepsnet: the cache entry {entry} is damaged or from an earlier version; it is made again", error=True)


def _read_entry(path: Path) -> str | None:
    """The JSON of an entry, whose first line is its checksum; None if the entry is missing or damaged."""
    try:
        checksum, _, content = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return content if checksum == _checksum(content) else None


def _checksum(content: str) -> str:
    return f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"
