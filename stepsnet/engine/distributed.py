"""The processes of ``torchrun``: this one's rank, what all ranks agree on, and DDP or FSDP around the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..device import pick_device
from ..errors import UserError
from ..machine import is_one_of_several
from ..models.blocks import blocks_of
from .task import BatchShard

__all__ = [
    "DistributedContext",
    "init_distributed",
    "broadcast_buffers",
    "sync_batch_norms",
    "parallelize",
    "full_tensor",
    "unwrap",
]


T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, the number of ranks, and the device that this rank works on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files and reports."""
        return self.rank == 0

    def mean(self, values: Sequence[Tensor]) -> list[float]:
        """The mean of each scalar over all ranks, with one synchronisation of the device."""
        gathered = torch.stack([value.detach().float().to(self.device) for value in values])
        if self.world_size > 1:
            dist.all_reduce(gathered)
            gathered /= self.world_size
        return gathered.tolist()

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def gather_objects(self, value: T) -> list[T]:
        """The value of each rank, on every rank."""
        return BatchShard(self.rank, self.world_size).gather(value)

    def on_main(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0, and return its result on every rank.

        Raises:
            UserError: on rank 0, if ``function`` raises it; the other ranks exit with status 2 and say nothing.
        """
        if self.world_size == 1:
            return function()
        value, failed = None, None
        if self.is_main:
            try:
                value = function()
            except UserError as error:
                failed = error
        value, has_failed = self.broadcast_object((value, failed is not None))
        if failed:
            raise failed
        if has_failed:
            raise SystemExit(2)
        return value

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def check_same(self, values: dict[str, Any]) -> None:
        """Raises UserError on every rank if one of them was started with other values than rank 0."""
        if self.world_size == 1:
            return
        everyone = self.gather_objects(json.dumps(values, default=str))
        for rank, theirs in enumerate(map(json.loads, everyone)):
            for key, value in json.loads(everyone[0]).items():
                if theirs.get(key) != value:
                    raise UserError(f"{key}: got {theirs.get(key)!r} on rank {rank}, expected rank 0's {value!r}")


@contextmanager
def init_distributed(device: str) -> Iterator[DistributedContext]:
    """Join the other processes of ``torchrun``; without torchrun, a context of one rank.

    Raises:
        UserError: the device is not there, this machine has fewer devices than ranks, or a variable by which the ranks
            find each other is missing or wrong.
    """
    if not is_one_of_several():
        picked = pick_device(device)
        index = None if picked.type == "cpu" else picked.index
        with torch.accelerator.device_index(index):  # else plain "cuda" would not mean cuda:1, say
            yield DistributedContext(0, 1, picked)
        return
    _check_variables()
    picked = pick_device(device)
    if picked.type != "cpu":
        index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if index >= there:
            ranks = os.environ.get("LOCAL_WORLD_SIZE", f"at least {index + 1}")
            raise UserError(
                f"torchrun: got {ranks} ranks on a machine with {there} devices, expected at most one rank per device"
            )
        picked = torch.device(picked.type, index)
        torch.accelerator.set_device_index(index)
    kind = picked.type
    dist.init_process_group("gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}")
    try:
        yield DistributedContext(dist.get_rank(), dist.get_world_size(), picked)
    except BaseException:
        # perhaps only this rank failed: destroying NCCL's group would wait for the others, and they wait for this one
        if picked.type == "cpu":
            dist.destroy_process_group()
        elif dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        raise
    dist.destroy_process_group()


def _check_variables() -> None:
    """Raises UserError if RANK and WORLD_SIZE are set, but not as torchrun sets them."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    whole = rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)
    if missing or not whole:
        without = f" without {' and '.join(missing)}" if missing else ""
        raise UserError(
            f"torchrun: got RANK={rank} and WORLD_SIZE={world_size}{without}, expected all variables as torchrun sets "
            "them, or none (`unset RANK WORLD_SIZE`)"
        )


def parallelize(model: nn.Module, parallel: Literal["ddp", "fsdp"], context: DistributedContext) -> nn.Module:
    """Wrap the model for all ranks: replicated (DDP), or with its weights sharded block by block (FSDP2)."""
    if context.world_size == 1:
        return model
    if parallel == "ddp":
        # rank 0's running statistics are copied before they are used (broadcast_buffers), not in every forward pass
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    mesh = dist.init_device_mesh(context.device.type, (context.world_size,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sync_batch_norms(*heads: nn.Module, device: str) -> None:
    """Let the batch norms in ``heads`` take their statistics over all ranks, since each rank has few images.

    On CUDA only: torch supports this nowhere else.
    """
    if dist.is_initialized() and pick_device(device).type == "cuda":
        for head in heads:
            nn.SyncBatchNorm.convert_sync_batchnorm(head)


def broadcast_buffers(context: DistributedContext, *models: nn.Module) -> None:
    """Copy rank 0's running statistics to all ranks; each rank has its own, and FSDP does not synchronise them."""
    if context.world_size > 1:
        every = dict.fromkeys(buffer for model in models for buffer in model.buffers())  # in the same order everywhere
        for buffer in every:
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
