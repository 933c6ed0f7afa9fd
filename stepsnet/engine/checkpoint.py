"""Checkpoints: written beside and renamed, with checksums; a half-written one is never taken for a whole one.

A checkpoint is a folder ``step-00001234`` with ``model.safetensors`` (weights and buffers), ``state.pt``
(optimizer and position, loadable with ``weights_only=True``) and ``SHA256SUMS``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..errors import UserError

__all__ = ["load_newest", "load_weights", "save_checkpoint", "save_weights"]

_SUMS = "SHA256SUMS"


def save_checkpoint(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], keep: int
) -> Path:
    """Write one, then remove all but the newest ``keep``.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    final, beside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.{os.getpid()}"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_weights(beside / "model.safetensors", weights)
        torch.save(dict(state), beside / "state.pt")
        sums = [f"{_sha256(beside / name)}  {name}\n" for name in ("model.safetensors", "state.pt")]
        (beside / _SUMS).write_text("".join(sums))
        for path in (*beside.iterdir(), beside):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)  # the same step, written by a run that was stopped and resumed there
        beside.rename(final)
        _flush(folder)
        for old in _steps(folder)[keep:]:
            shutil.rmtree(old)
        for torn in folder.glob(".step-*"):
            shutil.rmtree(torn, ignore_errors=True)
    except OSError as error:
        raise UserError(f"checkpoint: cannot write {final}: {error.strerror or error}") from error
    return final


def load_newest(folder: Path, map_location: torch.device) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
    """The newest whole checkpoint: its weights, its state, and a line for each that was passed over."""
    passed_over: list[str] = []
    for path in _steps(folder):
        try:
            _verify(path)
            weights = load_weights(path / "model.safetensors")
            state = torch.load(path / "state.pt", map_location=map_location, weights_only=True)
        except (OSError, UserError, RuntimeError, ValueError) as error:
            passed_over.append(f"passed over {path}: {error}")
            continue
        return weights, state, passed_over
    if passed_over:
        raise UserError("checkpoint: none is whole: " + "; ".join(passed_over))
    return None


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights from a safetensors file.

    Raises:
        UserError: the file is missing or no safetensors file.
    """
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise UserError(f"checkpoint: {path} does not exist") from None
    except Exception as error:  # the library raises a class of its own that it does not export
        raise UserError(f"checkpoint: cannot read {path} as safetensors: {error}") from error


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _verify(path: Path) -> None:
    for line in (path / _SUMS).read_text().splitlines():
        expected, name = line.split(maxsplit=1)
        if _sha256(path / name) != expected:
            raise UserError(f"{name} does not match its checksum")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk, so that the rename cannot come before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
