"""Checkpoints: written beside and renamed, with checksums; a half-written one is never taken for a whole one.

A checkpoint is a folder ``step-00001234``. Of one process, or of DDP, it holds ``model.safetensors`` (weights
and buffers), ``averages.safetensors`` where weights are averaged, and ``state.pt`` (optimizer by parameter
name and position, loadable with ``weights_only=True``). Of FSDP, ``shards/`` holds the tensors as
torch.distributed.checkpoint writes them, each rank its own, and ``state.pt`` the rest. Either kind loads into
any number of ranks. ``SHA256SUMS`` guards every file.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..errors import UserError
from .distributed import Ranks

__all__ = [
    "Checkpoint",
    "Trained",
    "load_into",
    "load_weights",
    "newest",
    "save_weights",
    "whole_ones",
    "whole_weights",
]

_SUMS, _SHARDS = "SHA256SUMS", "shards"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Trained:
    """What a checkpoint saves and restores, besides the position."""

    model: nn.Module
    optimizer: Optimizer
    averages: ModelEmaV3 | None
    ranks: Ranks
    sharded: bool  # by FSDP

    def _tensors(self) -> dict[str, Any]:
        """The tensors as this rank holds them."""
        tensors = {
            "model": _untied(self.model, get_model_state_dict(self.model)),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        if self.averages:
            tensors["averages"] = _untied(self.averages.module, get_model_state_dict(self.averages.module))
        return tensors

    def save(self, folder: Path, step: int, state: Mapping[str, Any], keep: int, best: int | None = None) -> Path:
        """Write a checkpoint, then remove all but the newest ``keep`` and the ``best`` step's.

        Every rank calls it.

        Raises:
            UserError: the disk is full, or the folder cannot be written.
        """
        final, beside = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
        try:
            if self.ranks.first:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            self.ranks.barrier()
            if self.sharded:
                dcp.save(self._tensors(), checkpoint_id=beside / _SHARDS)
            if self.ranks.first:
                if not self.sharded:
                    tensors = self._tensors()
                    save_weights(beside / "model.safetensors", tensors["model"])
                    if self.averages:
                        save_weights(beside / "averages.safetensors", tensors["averages"])
                    state = {**state, "optimizer": tensors["optimizer"]}
                torch.save(dict(state), beside / "state.pt")
                _publish(folder, beside, final, keep, best)
            self.ranks.barrier()
        except (OSError, dcp.CheckpointException, safetensors.SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "write" not in str(error):  # torch.save's own, of a full disk
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UserError(f"checkpoint: cannot write {final}: {reason}") from error
        return final

    def restore(self, checkpoint: Checkpoint) -> None:
        """Raises UserError where the checkpoint is of another model."""
        if (checkpoint.path / _SHARDS).is_dir():
            tensors = self._tensors()
            dcp.load(tensors, checkpoint_id=checkpoint.path / _SHARDS, no_dist=self.ranks.world_size == 1)
            set_model_state_dict(self.model, _retied(self.model, tensors["model"]))
            set_optimizer_state_dict(self.model, self.optimizer, tensors["optimizer"])
            if self.averages:
                set_model_state_dict(self.averages.module, _retied(self.averages.module, tensors["averages"]))
            return
        whole = StateDictOptions(full_state_dict=True)
        weights = _retied(self.model, load_weights(checkpoint.path / "model.safetensors"))
        check_fit(self.model, weights)
        set_model_state_dict(self.model, weights, options=whole)
        set_optimizer_state_dict(self.model, self.optimizer, checkpoint.state["optimizer"], options=whole)
        if self.averages:
            averages = load_weights(checkpoint.path / "averages.safetensors")
            set_model_state_dict(self.averages.module, _retied(self.averages.module, averages), options=whole)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on the disk."""

    path: Path
    state: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate: the averages, where there are any."""
        if (self.path / _SHARDS).is_dir():
            return _gathered(self.path / _SHARDS)
        averages = self.path / "averages.safetensors"
        return load_weights(averages if averages.exists() else self.path / "model.safetensors")


def newest(folder: Path, step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (or that of one step), and a line for each that was passed over.

    Raises:
        UserError: there are some and none is whole.
    """
    passed_over: list[str] = []
    for path in _steps(folder):
        if step is not None and path.name != f"step-{step:08d}":
            continue
        try:
            _verify(path)
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        except (OSError, UserError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            passed_over.append(f"passed over {path}: {error}")
            continue
        return Checkpoint(path, state), passed_over
    if passed_over:
        raise UserError("checkpoint: none is whole: " + "; ".join(passed_over))
    return None, []


def whole_ones(folder: Path) -> list[Checkpoint]:
    """Every whole checkpoint, the oldest first."""
    steps = [int(path.name.removeprefix("step-")) for path in reversed(_steps(folder))]
    found = []
    for step in steps:
        with suppress(UserError):
            checkpoint, _ = newest(folder, step)
            found += [checkpoint] if checkpoint else []
    return found


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """A model's weights on the CPU, gathered from all ranks on rank 0. Every rank calls it."""
    return _untied(model, get_model_state_dict(model, options=_WHOLE))


def load_into(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights into a model that nothing is put around; tied ones need to be there once.

    Raises:
        UserError: with the first tensors that differ.
    """
    weights = _retied(model, weights)
    check_fit(model, weights)
    model.load_state_dict(weights)


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)


def load_weights(path: Path) -> dict[str, Any]:
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


def check_fit(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError with the first tensors that differ, where ``load_state_dict`` prints them all."""
    expected = {name: tuple(tensor.shape) for name, tensor in _weights_of(model).items()}
    got = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    if differing:
        first = "; ".join(f"{n} {got.get(n, 'missing')}, expected {expected.get(n, 'none')}" for n in differing[:3])
        raise UserError(f"checkpoint: {len(differing)} tensors do not fit the model: got {first}")


def _ties(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another's too -> the first name of each."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def _untied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without second names, which safetensors refuses and an embedding is too large for."""
    ties = _ties(model)
    return {name: tensor for name, tensor in weights.items() if name not in ties}


def _retied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    ties = _ties(model)
    return {**{name: weights[first] for name, first in ties.items() if first in weights}, **weights}


def _weights_of(model: nn.Module) -> dict[str, Any]:
    """By the names that they have without what is put around the model."""
    return get_model_state_dict(model)


def _publish(folder: Path, beside: Path, final: Path, keep: int, best: int | None) -> None:
    """Bring it to the disk, rename it, and remove older ones."""
    files = sorted(path for path in beside.rglob("*") if path.is_file())
    (beside / _SUMS).write_text("".join(f"{_sha256(path)}  {path.relative_to(beside)}\n" for path in files))
    for path in (*beside.rglob("*"), beside):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)  # the same step, written by a run that was stopped and resumed there
    beside.rename(final)
    _flush(folder)
    for old in _steps(folder)[keep:]:
        if best is None or old.name != f"step-{best:08d}":
            shutil.rmtree(old)
    for torn in folder.glob(".step-*"):
        shutil.rmtree(torn, ignore_errors=True)


def _gathered(shards: Path) -> dict[str, Tensor]:
    """The weights of a sharded checkpoint, without a model to tell their shapes."""
    tensors = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    kind = "averages" if any(name.startswith("averages.") for name in tensors) else "model"
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensors.items()
        if name.startswith(f"{kind}.") and isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(wanted, checkpoint_id=shards, no_dist=True)
    return {name.removeprefix(f"{kind}."): tensor for name, tensor in wanted.items()}


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
