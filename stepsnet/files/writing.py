"""Plain data as the text of a file; atomic writes, after which a reader sees the old file or the new one; checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from .reading import add_yaml_schema

__all__ = [
    "LOCKLESS",
    "SUMS",
    "dump_json",
    "dump_yaml",
    "encodable",
    "flush",
    "is_encodable",
    "is_temporary",
    "is_whole",
    "remove_temporaries",
    "replacing",
    "require_new",
    "require_writable_folder",
    "sha256",
    "verify",
    "without_nonfinite",
    "write_atomically",
    "write_new",
    "write_sums",
]

SUMS = "SHA256SUMS"
LOCKLESS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # how flock fails on a disk that has no locks

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")  # beside a file that is being written


def dump_yaml(content: Any, *, lists_in_line: bool = False) -> str:
    """Plain data as YAML that both :func:`.reading.parse_yaml` and readers of YAML 1.1 read back unchanged."""
    import yaml

    dumper = _dumper()
    if lists_in_line:
        tag = "tag:yaml.org,2002:seq"
        dumper.add_representer(list, lambda own, value: own.represent_sequence(tag, value, flow_style=True))
    return yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)


def dump_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts, with null in place of numbers that are not finite."""
    return json.dumps(without_nonfinite(value), indent=indent, allow_nan=False)


def without_nonfinite(value: Any) -> Any:
    """The value as JSON can hold it: None in place of numbers that are not finite, and lists in place of tuples."""
    if isinstance(value, dict):
        return {key: without_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dumper() -> Any:
    """PyYAML's dumper, which quotes text that either version of YAML would read as something else."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    add_yaml_schema(Dumper, {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()})
    return Dumper


def encodable(text: str) -> str:
    """The text with surrogates escaped: file names that are not UTF-8 have them, and no UTF-8 file can hold them."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON may have half of a surrogate pair."""
    return encodable(text) == text


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside the file, flush and rename; the folder is made if needed.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Create an empty file beside ``path`` for the block to write; it then takes the place of ``path``.

    Its name cannot be foreseen and this call creates it, so no link that somebody has put there is followed.

    Raises:
        UserError: the disk is full, or the file cannot be written; ``path`` stays as it was.
    """
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _beside(path: Path) -> Path:
    """A unique name for a file that will take the place of ``path``; see :func:`is_temporary`."""
    return path.with_name(f".{path.name[:32]}.{secrets.token_hex(8)}.tmp")  # a name may be as long as the limit


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file as a whole if there is none; if there is one, leave it and return False.

    If several processes write one file at once, even on machines that share the folder, one of them gets True.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    whole = _beside(path)
    write_atomically(whole, content)
    try:
        os.link(whole, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system: two processes may both get here
        if os.path.lexists(path):
            return False
        write_atomically(path, content)
    finally:
        whole.unlink(missing_ok=True)
    return True


def require_new(paths: Iterable[Path], force: bool) -> None:
    """Raises UserError for the first of these files that exists, unless it may be replaced."""
    there = next((path for path in paths if os.path.lexists(path)), None)
    if there is not None and not force:
        raise UserError(f"--out: {there} already exists; --force replaces it")


def require_writable_folder(path: Path, key: str) -> None:
    """Raises UserError for a folder that cannot be made or written to, before any work is done for it."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise UserError(f"{key}: got {path}, expected a folder, but {existing} is not one")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{key}: got {path}, expected a folder that can be written to")


def flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename cannot reach the disk before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """List the checksum of every file below a folder in its ``SHA256SUMS``, as ``sha256sum --check`` reads them.

    The presence of this file marks the folder as complete, so it is written atomically. Raises OSError if it cannot
    be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = _beside(folder / SUMS)
    whole.write_text("".join(f"{sha256(path)}  {path.relative_to(folder)}\n" for path in files))
    flush(whole)
    os.replace(whole, folder / SUMS)


def verify(folder: Path, required: str) -> None:
    """Raises UserError, OSError or ValueError if a folder is not as :func:`write_sums` found it.

    Args:
        required: a file that every complete folder has.
    """
    lines = [line.split(maxsplit=1) for line in (folder / SUMS).read_text().splitlines()]
    sums = {name: expected for expected, name in lines}
    files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name[0] != ".")
    unlisted = next((name for name in (required, *sorted(files)) if name not in sums and name != SUMS), None)
    if unlisted:
        raise UserError(f"{SUMS} does not list {unlisted}")
    for name, expected in sums.items():
        if sha256(folder / name) != expected:
            raise UserError(f"{name} does not match its checksum")


def is_whole(folder: Path, required: str) -> bool:
    """Whether :func:`verify` finds nothing wrong."""
    try:
        verify(folder, required)
    except (OSError, UserError, ValueError):
        return False
    return True


def is_temporary(path: Path) -> bool:
    """Whether this is a temporary file of :func:`replacing`, which a killed process leaves behind."""
    return bool(_TEMPORARY.fullmatch(path.name))


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes have left in a folder whose lock this one holds."""
    for path in folder.iterdir():
        if is_temporary(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
