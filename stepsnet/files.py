"""Atomic writes, so that a reader sees the old file or the new one; and the cache of what is computed once."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from .errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write under a temporary name and rename; the folder is made if needed.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


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
