"""Atomic writes, so that a reader sees the old file or the new one; and the cache of what is computed once."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from .errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


# beside a file that is being written; the second kind is that of earlier versions
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.config\.yaml\.\d+")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside the file, flush and rename; the folder is made if needed.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path`` to be written in the block, which then takes the place of ``path``.

    Its name cannot be foreseen and it is created by this call, so a link that somebody has put there is not followed.

    Raises:
        UserError: the disk is full, or the file cannot be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = os.fstat(descriptor).st_mode & 0o777  # as the umask has it
        os.close(descriptor)
        try:
            yield temporary
            temporary.chmod(mode)  # safetensors puts a file of its own there, which nobody else may read
            flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename cannot reach the disk before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Whether a file is one that :func:`replacing` has left, where its process was killed."""
    return bool(_TEMPORARY.fullmatch(path.name))


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes have left in a folder whose lock this one holds."""
    for path in folder.iterdir():
        if is_temporary(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def refuse_to_replace(paths: Iterable[Path], force: bool) -> None:
    """Raises UserError where one of the files is already there, unless ``force`` says that it may be replaced."""
    there = next((path for path in paths if os.path.lexists(path)), None)
    if there and not force:
        raise UserError(f"--out: {there} is already there, expected a new place (--force replaces it)")


def cache_folder() -> Path:
    """Where files computed once per data set are kept: ``STEPSNET_CACHE``, by default ``~/.cache/stepsnet``."""
    return Path(os.environ.get("STEPSNET_CACHE") or Path.home() / ".cache" / "stepsnet")


def cached_json(name: str, compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns, as JSON reads it back. It is called once; a second process waits for the first.

    Args:
        name: of the file in :func:`cache_folder`.

    Raises:
        UserError: the folder cannot be written, or what ``compute`` raises; then nothing is cached.
    """
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{path.parent}: {error.strerror}"
        raise UserError(f"data: cannot write {where}; STEPSNET_CACHE names another folder") from None
    with FileLock(f"{path}.lock"):
        if not path.exists():
            write_atomically(path, json.dumps(compute()))
        return json.loads(path.read_text(encoding="utf-8"))


def png_bytes(image: Image) -> bytes:
    """An image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
