"""Saves and restores the state of a training. A checkpoint is written under a temporary name and renamed when complete.

run_folder/checkpoint.py describes the files and reads them. A checkpoint of one process, of DDP or of FSDP loads into
any number of ranks.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from contextlib import suppress
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

from ..errors import UserError, in_a_line
from ..files.writing import flush, is_whole, write_sums
from ..run_folder.checkpoint import (
    SHARDS,
    STATE,
    Checkpoint,
    check_fit,
    latest,
    load_weights,
    retied,
    save_weights,
    untied,
)
from ..run_folder.records import checkpoint_folders, step_of
from .distributed import DistributedContext, unwrap

__all__ = ["TrainState", "find_checkpoint", "full_state_dict"]

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class TrainState:
    """The tensors that a checkpoint saves and restores."""

    model: nn.Module
    optimizer: Optimizer
    averages: ModelEmaV3 | None
    context: DistributedContext
    sharded: bool  # by FSDP

    def _tensors(self) -> dict[str, Any]:
        """The tensors of this rank: full ones, or its shards."""
        tensors = {
            "model": untied(self.model, get_model_state_dict(self.model)),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        if self.averages:
            tensors["averages"] = untied(self.averages.module, get_model_state_dict(self.averages.module))
        return tensors

    def _beyond_parameters(self) -> dict[str, Any]:
        """The optimizer's state that belongs to no parameter, such as Kron's random state."""
        state = self.optimizer.state_dict()
        return {key: value for key, value in state.items() if key not in ("state", "param_groups")}

    def save(self, folder: Path, step: int, state: Mapping[str, Any], keep: int, best: int | None = None) -> Path:
        """Write a checkpoint, then remove all but the latest ``keep`` and that of step ``best``.

        Every rank calls it.

        Raises:
            UserError: the disk is full, or the folder cannot be written.
        """
        final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
        try:
            if self.context.is_main:
                _remove(temporary)
                temporary.mkdir(parents=True)
            self.context.barrier()
            if self.sharded:
                dcp.save(self._tensors(), checkpoint_id=temporary / SHARDS)
            if self.context.is_main:
                if not self.sharded:
                    tensors = self._tensors()
                    save_weights(temporary / "model.safetensors", tensors["model"])
                    if self.averages:
                        save_weights(temporary / "averages.safetensors", tensors["averages"])
                    state = {**state, "optimizer": tensors["optimizer"], "of_optimizer": self._beyond_parameters()}
                _save(dict(state), temporary / STATE)
                _publish(folder, temporary, final, keep, best)
            self.context.barrier()
        except (OSError, dcp.CheckpointException, safetensors.SafetensorError) as error:
            reason = getattr(error, "strerror", None) or in_a_line(error)
            raise UserError(f"checkpoint: cannot write {final}: {reason}") from error
        return final

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint. Raises UserError if it is of another model."""
        if (checkpoint.path / SHARDS).is_dir():
            tensors = self._tensors()
            saved = dcp.FileSystemReader(checkpoint.path / SHARDS).read_metadata().state_dict_metadata
            of_parameters = tensors["optimizer"]["state"]
            for name in [name for name in of_parameters if not any(_is_of(name, key) for key in saved)]:
                del of_parameters[name]
            dcp.load(tensors, checkpoint_id=checkpoint.path / SHARDS, no_dist=self.context.world_size == 1)
            set_model_state_dict(self.model, retied(self.model, tensors["model"]))
            self._restore_optimizer(tensors["optimizer"], StateDictOptions(strict=False))
            if self.averages:
                set_model_state_dict(self.averages.module, retied(self.averages.module, tensors["averages"]))
            return
        whole = StateDictOptions(full_state_dict=True)
        weights = retied(self.model, load_weights(checkpoint.path / "model.safetensors"))
        check_fit(self.model, weights)
        # before the weights: to set the state, torch makes an update with gradients and a rate of 0, in which MADGRAD's
        # rounding may change weights
        of_some = StateDictOptions(full_state_dict=True, strict=False)
        self._restore_optimizer(checkpoint.state["optimizer"], of_some)
        if beyond := checkpoint.state["of_optimizer"]:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **beyond})
        set_model_state_dict(self.model, weights, options=whole)
        if self.averages:
            averages = load_weights(checkpoint.path / "averages.safetensors")
            set_model_state_dict(self.averages.module, retied(self.averages.module, averages), options=whole)

    def _restore_optimizer(self, saved: dict[str, Any], options: StateDictOptions) -> None:
        """Load the optimizer's state; parameters without gradients have none, nor has SGD without momentum."""
        if saved["state"]:
            set_optimizer_state_dict(self.model, self.optimizer, saved, options=options)
        for group, names in zip(self.optimizer.param_groups, saved["param_groups"]):
            for parameter, name in zip(group["params"], names["params"]):
                if name not in saved["state"]:  # torch has made one, by an update with gradients of 0
                    self.optimizer.state.pop(parameter, None)


def _is_of(parameter: str, key: str) -> bool:
    """Whether a key of a sharded checkpoint belongs to the optimizer's state of a parameter."""
    return key.startswith(f"optimizer.state.{parameter}.")


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's weights on the CPU, gathered from all ranks on rank 0. Every rank calls it."""
    model = unwrap(model)  # torch leaves out the wrapper's part of each name, and ties are found by name
    return untied(model, get_model_state_dict(model, options=_GATHERED))


def find_checkpoint(folder: Path, context: DistributedContext) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint from which all ranks go on, rank 0's latest valid one, and a line for each that it skipped.

    Raises:
        UserError: there are checkpoints and rank 0 finds none valid (the other ranks exit, as in ``on_main``), or a
            rank cannot read rank 0's checkpoint, for example because each machine has the folder on its own disk.
    """
    found: Checkpoint | None = None

    def of_main() -> tuple[int | None, list[str]]:
        nonlocal found
        _recover(folder)
        found, skipped = latest(folder)
        return None if found is None else step_of(found.path), skipped

    step, skipped = context.on_main(of_main)
    if step is None:
        return None, skipped
    if not context.is_main:
        with suppress(UserError):
            found, _ = latest(folder, step)
    readable = context.gather_objects(found is not None)
    if not all(readable):
        raise UserError(
            f"checkpoint: rank {readable.index(False)} cannot read the one of update {step} in {folder}, from which "
            "rank 0 resumes; expected one folder that all ranks see"
        )
    return found, skipped


def _recover(folder: Path) -> None:
    """Rename whole checkpoints that a killed process has left under a temporary name.

    A damaged one of the same update, such as one that the process was replacing, gives way to it.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        for path in checkpoint_folders(folder):
            final = folder / f"step-{step_of(path):08d}"
            if path != final and is_whole(path, STATE) and not is_whole(final, STATE):
                _rename_over(path, final)
    except OSError as error:
        raise UserError(f"checkpoint: cannot write {folder}: {error.strerror}") from error


def _save(state: dict[str, Any], path: Path) -> None:
    """Call ``torch.save``, whose RuntimeErrors do not say that a disk is full. Raises OSError in their place."""
    try:
        torch.save(state, path)
    except RuntimeError as error:
        free = shutil.disk_usage(path.parent).free
        hint = "" if free < 2**30 else "; perhaps a quota or a limit on file sizes"
        raise OSError(errno.EIO, f"writing failed, with {free / 2**30:.1f} GiB free on the disk{hint}") from error


def _publish(folder: Path, temporary: Path, final: Path, keep: int, best: int | None) -> None:
    """Flush a checkpoint to the disk, rename it, and remove older ones.

    At every moment there is a whole one, if only under its temporary name.
    """
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    write_sums(temporary)
    flush(temporary)
    _rename_over(temporary, final)
    # a later one is damaged, since the run went on from an earlier one
    named = [path for path in checkpoint_folders(folder) if not path.name.startswith(".")]
    until_now = [path for path in named if step_of(path) <= step_of(final)]
    for old in until_now[keep:]:
        if step_of(old) != best:
            _remove(old)  # what cannot be removed yet, such as a file that is open on NFS, is tried again next time
    for leftover in (*folder.glob(".step-*"), *folder.glob(".old-*")):
        _remove(leftover)


def _rename_over(temporary: Path, final: Path) -> None:
    """Rename a folder; one that has the name, from a run stopped and resumed at this update, is put aside first."""
    if final.exists():
        aside = final.with_name(f".old-{final.name}")
        _remove(aside)
        final.rename(aside)
    temporary.rename(final)
    flush(final.parent)


def _remove(leftover: Path) -> None:
    if leftover.is_symlink():
        leftover.unlink()
    shutil.rmtree(leftover, ignore_errors=True)
