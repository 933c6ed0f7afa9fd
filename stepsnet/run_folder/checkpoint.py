"""Weights and checkpoints on the disk: reading them, and detecting damaged ones.

A checkpoint is a folder ``step-00001234``. With a single process or DDP, it holds ``model.safetensors`` (weights
and buffers), ``averages.safetensors`` if weights are averaged, and ``state.pt`` (the optimizer, by parameter name,
and the position; loadable with ``weights_only=True``). With FSDP, ``shards/`` holds the tensors as
torch.distributed.checkpoint writes them, each rank its own, and ``state.pt`` the rest. ``SHA256SUMS`` guards
every file. It is written last, so a folder that matches it is complete, even under the temporary name
``.step-00001234``, which stays if the process is killed before the rename. engine/train_state.py writes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ..errors import UserError, in_a_line
from ..files.writing import replacing, sha256, verify
from .records import checkpoint_folders, step_of

__all__ = [
    "SHARDS",
    "STATE",
    "Checkpoint",
    "check_fit",
    "latest",
    "load_into",
    "load_weights",
    "retied",
    "save_weights",
    "untied",
    "valid_checkpoints",
    "write_weights",
]

STATE, SHARDS = "state.pt", "shards"


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint on the disk."""

    path: Path
    state: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate: the averages, if there are any."""
        if (self.path / SHARDS).is_dir():
            return _gathered(self.path / SHARDS)
        averages = self.path / "averages.safetensors"
        return load_weights(averages if averages.exists() else self.path / "model.safetensors")

    def check_data(self, now: Mapping[str, int]) -> None:
        """Raises UserError if the checkpoint is of data with other counts than these."""
        if now != (before := self.state["data"]):
            got, expected = (", ".join(f"{name} {count}" for name, count in of.items()) for of in (now, before))
            raise UserError(f"--resume: the data have {got}, expected the counts that the run began with: {expected}")


def latest(folder: Path, step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The latest valid checkpoint (or the one at a given step), and a line for each that was skipped.

    Raises:
        UserError: there are checkpoints, but none is valid.
    """
    skipped: list[str] = []
    for path in checkpoint_folders(folder):
        if step is not None and step_of(path) != step:
            continue
        try:
            verify(path, STATE)
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        except (OSError, UserError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            skipped.append(f"skipped {path}: {error}")
            continue
        return Checkpoint(path, state), skipped
    if skipped:
        raise UserError("checkpoint: none of them is valid: " + "; ".join(skipped))
    return None, []


def valid_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every valid checkpoint, the oldest first."""
    found = []
    for step in sorted({step_of(path) for path in checkpoint_folders(folder)}):
        with suppress(UserError):
            checkpoint, _ = latest(folder, step)
            found += [checkpoint] if checkpoint else []
    return found


def load_into(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights into a model without wrappers. Of tied weights, those under the first name are enough.

    Raises:
        UserError: the weights do not fit the model; the message names the first tensors that differ.
    """
    weights = retied(model, weights)
    check_fit(model, weights)
    model.load_state_dict(weights)


def save_weights(path: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file of weights that others may read if the umask lets them.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    path = Path(path)
    path.touch()
    mode = path.stat().st_mode & 0o777
    safetensors.torch.save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)
    path.chmod(mode)  # safetensors puts a new file there, which nobody else may read


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> str:
    """Replace a file of weights as a whole and return its SHA-256. Raises UserError if it cannot be written."""
    with replacing(path) as temporary:
        try:
            save_weights(temporary, weights)
        except safetensors.SafetensorError as error:
            raise UserError(f"cannot write {path}: {in_a_line(error)}") from error
        return sha256(temporary)


def load_weights(path: Path) -> dict[str, Any]:
    """Load weights from a safetensors file.

    Raises:
        UserError: the file is missing or is not a safetensors file.
    """
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise UserError(f"checkpoint: {path} does not exist") from None
    except Exception as error:  # the library raises a class of its own that it does not export
        raise UserError(f"checkpoint: cannot read {path} as safetensors: {error}") from error


def check_fit(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError with the first tensors that differ; ``load_state_dict`` would list all of them."""
    own: dict[str, Any] = get_model_state_dict(model)  # by their names without the model's wrappers
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    got = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    if differing:
        first = "; ".join(f"{n} {got.get(n, 'missing')}, expected {expected.get(n, 'none')}" for n in differing[:3])
        raise UserError(f"checkpoint: {len(differing)} tensors do not fit the model: got {first}")


def _ties(model: nn.Module) -> dict[str, str]:
    """Tied weights: each additional name of a parameter or a buffer -> its first name."""
    first: dict[int, str] = {}
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def untied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights without the additional names of tied ones: safetensors refuses them, and an embedding is large."""
    ties = _ties(model)
    return {name: tensor for name, tensor in weights.items() if name not in ties}


def retied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    ties = _ties(model)
    return {**{name: weights[first] for name, first in ties.items() if first in weights}, **weights}


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
