"""What a run trains, and how it is written to the disk: beside and renamed, so that half a checkpoint is never read.

checkpoint.py describes the files and reads them. A checkpoint of one process, of DDP or of FSDP loads into any
number of ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..checkpoint import (
    SHARDS,
    SUMS,
    Checkpoint,
    check_fit,
    checkpoint_folders,
    load_weights,
    retied,
    save_weights,
    sha256,
    untied,
)
from ..errors import UserError
from .distributed import DistributedContext

__all__ = ["TrainState", "full_state_dict"]

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint saves and restores, besides the position."""

    model: nn.Module
    optimizer: Optimizer
    averages: ModelEmaV3 | None
    context: DistributedContext
    sharded: bool  # by FSDP

    def _tensors(self) -> dict[str, Any]:
        """The tensors as this rank holds them."""
        tensors = {
            "model": untied(self.model, get_model_state_dict(self.model)),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        if self.averages:
            tensors["averages"] = untied(self.averages.module, get_model_state_dict(self.averages.module))
        return tensors

    def save(self, folder: Path, step: int, state: Mapping[str, Any], keep: int, best: int | None = None) -> Path:
        """Write a checkpoint, then remove all but the newest ``keep`` and the ``best`` step's.

        Every rank calls it.

        Raises:
            UserError: the disk is full, or the folder cannot be written.
        """
        final, beside = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
        try:
            if self.context.is_main:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            self.context.barrier()
            if self.sharded:
                dcp.save(self._tensors(), checkpoint_id=beside / SHARDS)
            if self.context.is_main:
                if not self.sharded:
                    tensors = self._tensors()
                    save_weights(beside / "model.safetensors", tensors["model"])
                    if self.averages:
                        save_weights(beside / "averages.safetensors", tensors["averages"])
                    state = {**state, "optimizer": tensors["optimizer"]}
                torch.save(dict(state), beside / "state.pt")
                _publish(folder, beside, final, keep, best)
            self.context.barrier()
        except (OSError, dcp.CheckpointException, safetensors.SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "write" not in str(error):  # torch.save's own, of a full disk
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UserError(f"checkpoint: cannot write {final}: {reason}") from error
        return final

    def restore(self, checkpoint: Checkpoint) -> None:
        """Raises UserError where the checkpoint is of another model."""
        if (checkpoint.path / SHARDS).is_dir():
            tensors = self._tensors()
            dcp.load(tensors, checkpoint_id=checkpoint.path / SHARDS, no_dist=self.context.world_size == 1)
            set_model_state_dict(self.model, retied(self.model, tensors["model"]))
            set_optimizer_state_dict(self.model, self.optimizer, tensors["optimizer"])
            if self.averages:
                set_model_state_dict(self.averages.module, retied(self.averages.module, tensors["averages"]))
            return
        whole = StateDictOptions(full_state_dict=True)
        weights = retied(self.model, load_weights(checkpoint.path / "model.safetensors"))
        check_fit(self.model, weights)
        set_model_state_dict(self.model, weights, options=whole)
        set_optimizer_state_dict(self.model, self.optimizer, checkpoint.state["optimizer"], options=whole)
        if self.averages:
            averages = load_weights(checkpoint.path / "averages.safetensors")
            set_model_state_dict(self.averages.module, retied(self.averages.module, averages), options=whole)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's weights on the CPU, gathered from all ranks on rank 0. Every rank calls it."""
    return untied(model, get_model_state_dict(model, options=_GATHERED))


def _publish(folder: Path, beside: Path, final: Path, keep: int, best: int | None) -> None:
    """Bring it to the disk, rename it, and remove older ones."""
    files = sorted(path for path in beside.rglob("*") if path.is_file())
    (beside / SUMS).write_text("".join(f"{sha256(path)}  {path.relative_to(beside)}\n" for path in files))
    for path in (*beside.rglob("*"), beside):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)  # the same step, written by a run that was stopped and resumed there
    beside.rename(final)
    _flush(folder)
    for old in checkpoint_folders(folder)[keep:]:
        if best is None or old.name != f"step-{best:08d}":
            shutil.rmtree(old)
    for torn in folder.glob(".step-*"):
        shutil.rmtree(torn, ignore_errors=True)


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk, so that the rename cannot come before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
