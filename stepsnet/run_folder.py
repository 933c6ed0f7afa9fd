"""The folder of a run: how it is opened and locked, what it holds, and where its weights are.

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from .config import MAY_CHANGE_ON_RESUME, Recipe
from .errors import UserError
from .files import write_atomically
from .from_data import as_begun
from .overrides import read_recipe, to_plain, to_yaml

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_run_folder",
    "find_runs",
    "folder_name",
    "has_weights",
    "lock_folder",
    "open_run_folder",
    "read_metrics",
    "read_run_recipe",
    "read_summary",
    "read_weights",
]


def folder_name(name: str) -> str:
    """What a run of that name is called among others: one folder, whatever the name holds, and not a hidden one."""
    return re.sub(r"[^\w.+=@-]", "-", name).lstrip(".-")[:60] or "run"


def open_run_folder(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Make the run folder and write ``config.yaml``, or check that it holds this very recipe.

    What the recipe leaves open may be anything in the folder.

    Raises:
        UserError: as :func:`check_run_folder`, or the folder cannot be made.
    """
    if check_run_folder(folder, recipe, resume):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None
    write_atomically(folder / "config.yaml", to_yaml(recipe))


def check_run_folder(folder: Path, recipe: Recipe, resume: bool) -> bool:
    """Whether the folder holds this very recipe, which goes on there; nothing is written.

    Raises:
        UserError: the folder is not empty, or holds another recipe.
    """
    config = folder / "config.yaml"
    if config.exists() and resume:
        _check_channel_order(folder)
        begun = read_recipe(config)
        theirs, ours = to_plain(begun), to_plain(as_begun(recipe, begun))
        for key, value in ours.items():
            if key in MAY_CHANGE_ON_RESUME or key == "data":  # the same data may have moved
                continue
            if theirs[key] != value:
                raise UserError(f"--run: {folder} holds a run with {key} {theirs[key]!r}, got {value!r}")
        return True
    try:
        if folder.exists() and any(folder.iterdir()):
            hint = "--resume continues the run in it" if config.exists() else "nothing in it is overwritten"
            raise UserError(f"--run: {folder} is not empty, expected a new folder ({hint})")
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"--run: cannot use {folder}: {there} is not a folder that may be written to")
    return False


@contextmanager
def lock_folder(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases however the process ends.

    Args:
        writes: False on ranks that write nothing, which need no lock.

    Raises:
        UserError: another process holds it.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        if writes:
            lock.acquire()
    except Timeout:
        raise UserError(f"--run: {folder} is in use by a run that is still alive") from None
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):
            error.run_folder = folder  # type: ignore[attr-defined] # where an unforeseen one is recorded
        raise
    finally:
        lock.release()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these: each itself, or those within a comparison's, a sweep's or a study's."""
    found: list[Path] = []
    for folder in folders:
        has_begun = (folder / "metrics.jsonl").exists()  # as a run; a comparison's folder has only a config.yaml
        inside = [] if has_begun else sorted(path.parent for path in folder.glob("*/config.yaml"))
        found += inside or [folder]
    return found


def read_run_recipe(folder: Path) -> Recipe:
    """Raises UserError where the folder is not a run's."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")
    _check_channel_order(folder)
    return read_recipe(folder / "config.yaml")


def _check_channel_order(folder: Path) -> None:
    """Raises UserError for a run with reverse=True of an earlier version, which ordered the channels otherwise.

    Its weights would load, into other channels. Those versions wrote no ``title``.
    """
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    if re.search(r"^\s+reverse: true$", text, re.MULTILINE) and not re.search(r"^title:", text, re.MULTILINE):
        raise UserError(
            f"run: {folder} was trained with reverse=True by an earlier version, which ordered the channels otherwise; "
            "expected a run of this version"
        )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What a run that has ended says of itself; None where it has not ended."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def has_weights(folder: Path) -> bool:
    """Whether a run has final weights or a checkpoint; they are not read."""
    return (folder / "model.safetensors").exists() or any(folder.glob("checkpoints/step-*"))


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """A run's final weights, or those of its latest valid checkpoint.

    Raises:
        UserError: there are none yet, or they cannot be read.
    """
    from .checkpoint import latest, load_weights

    _check_channel_order(folder)
    if (folder / "model.safetensors").exists():
        return load_weights(folder / "model.safetensors")
    checkpoint, _ = latest(folder / "checkpoints")
    if checkpoint is None:
        raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
    return checkpoint.weights()
