"""The memory that training takes on one device: predicted without a device, in bytes.

Weights, gradients, optimizer states and averages follow from the number of parameters. Activations
have no short formula across families, so one forward and backward pass is run on fake tensors, which
have shapes, types and lifetimes but no data, and the largest sum of living storages is kept. That also
sees what hooks on saved tensors do not: inputs kept by gradient checkpointing and the block that it
recomputes, casts made by autocast, and gradients in flight.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.task import BatchShard
from ..engine.update import autocast
from ..errors import UserError, nearest
from ..stream import blocks_of, recompute_blocks

__all__ = ["Memory", "activation_bytes", "plan_memory", "render_memory", "training_memory"]

AMP_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    averages: int
    gathered: int  # FSDP's unsharded copies
    activations: int

    @property
    def total(self) -> int:
        """The sum in bytes: the peak where gradients are accumulated, and else at most that.

        In the first backward pass of an update, gradients come while activations go.
        """
        return sum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, int]:
        """The terms and their ``total``, in bytes."""
        return {**asdict(self), "total": self.total}


def training_memory(
    model: nn.Module,
    input_size: tuple[int, ...],
    micro_batch: int,
    *,
    devices: int = 1,
    shard: bool = False,
    optimizer_states: int = 2,
    average: bool = False,
    grad_checkpointing: float = 0.0,
    amp_dtype: str = "float32",
) -> Memory:
    """Predict the memory in bytes that training takes on one device.

    The device's own context, cached blocks that its allocator cannot reuse and kernels' workspaces come on top.

    Args:
        model: on any device, the meta device included; it is neither changed nor run.
        input_size: the shape of one sample, such as (3, 224, 224).
        micro_batch: samples a forward pass on one device.
        devices: among which FSDP divides; DDP, with gradients as views of its buckets, needs no more than one.
        shard: FSDP in place of DDP.
        optimizer_states: tensors a parameter: 2 for AdamW and LAMB, 1 for SGD with momentum.
        average: an exponential moving average of the weights is kept.
        grad_checkpointing: share of the blocks, from the first on, that the backward pass recomputes.
        amp_dtype: of the forward pass by autocast: float32, bfloat16 or float16.

    Raises:
        UserError: a number out of range, or an unknown ``amp_dtype``.
    """
    _check(micro_batch=micro_batch, devices=devices, optimizer_states=(optimizer_states, 0))
    activations = activation_bytes(model, input_size, micro_batch, grad_checkpointing, amp_dtype)
    return _with_states(model, activations, devices if shard else 1, optimizer_states, average)


def activation_bytes(
    model: nn.Module,
    input_size: tuple[int, ...],
    micro_batch: int,
    grad_checkpointing: float = 0.0,
    amp_dtype: str = "float32",
) -> int:
    """Peak bytes of a forward and backward pass beyond the inputs, weights, buffers and kept gradients.

    Shape: the model takes (``micro_batch``, *``input_size``) and returns one tensor, or a tuple of them. Attention
    is counted as the fused kernel that never holds the N×N scores, and autocast by its list for CPUs, which differs
    from that for GPUs in a few small operations.

    Raises:
        UserError: as :func:`training_memory`.
    """
    _check(micro_batch=micro_batch)
    if not 0 <= grad_checkpointing <= 1:
        raise UserError(f"grad_checkpointing: got {grad_checkpointing}, expected 0 to 1")
    if amp_dtype not in AMP_DTYPES:
        raise UserError(f"amp_dtype: got {amp_dtype!r}, expected one of {', '.join(AMP_DTYPES)}")
    with FakeTensorMode():
        model = _fake_copy(model)
        _recompute_first(model, grad_checkpointing)
        for parameter in model.parameters():
            # gradients have a term of their own; here they live as long as it takes to add them up
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        inputs = torch.empty(micro_batch, *input_size)
        with _LiveBytes((inputs, *model.parameters(), *model.buffers())) as live:
            with autocast(amp_dtype, inputs.device):
                output = model(inputs)
            outputs = output if isinstance(output, tuple) else (output,)
            torch.stack([one.float().sum() for one in outputs]).sum().backward()
    return live.peak


def plan_memory(
    name: str,
    batch_size: int,
    *,
    devices: int = 1,
    accumulation_steps: int = 1,
    shard: bool = False,
    average: bool = False,
    grad_checkpointing: float = 0.0,
    amp_dtype: str = "float32",
) -> dict[str, Any]:
    """Bytes a device under DDP, and under FSDP too with ``shard``, for a timm model's own input size and AdamW.

    ``batch_size`` is the effective one: samples an update.

    Raises:
        UserError: as :func:`training_memory`; a name that timm does not know; a batch that devices ×
            accumulation_steps do not divide.
    """
    _check(batch_size=batch_size, devices=devices, accumulation_steps=accumulation_steps)
    micro_batch = BatchShard(0, devices, accumulation_steps).micro_batch_size(batch_size)
    if not timm.is_model(name):
        raise UserError(f"model: got {name!r}, expected a timm or StepsNet model{nearest(name, timm.list_models())}")
    with torch.device("meta"):
        model = timm.create_model(name)
    input_size = model.pretrained_cfg["input_size"]
    activations = activation_bytes(model, input_size, micro_batch, grad_checkpointing, amp_dtype)
    ways = {"ddp": 1, "fsdp": devices} if shard else {"ddp": 1}
    return {
        **dict(model=name, input_size=input_size, batch_size=batch_size, devices=devices, micro_batch=micro_batch),
        **dict(accumulation_steps=accumulation_steps, grad_checkpointing=grad_checkpointing, amp_dtype=amp_dtype),
        **{way: _with_states(model, activations, shards, 2, average).as_dict() for way, shards in ways.items()},
    }


def render_memory(plan: dict[str, Any]) -> str:
    """:func:`plan_memory`'s result as a Markdown table in MiB and GiB, a row a term."""
    ways = [way for way in ("ddp", "fsdp") if way in plan]
    shape = "×".join(map(str, (plan["micro_batch"], *plan["input_size"])))
    recomputed = f", {plan['grad_checkpointing']:.0%} of the blocks checkpointed" if plan["grad_checkpointing"] else ""
    lines = [
        f"{plan['model']}, {plan['amp_dtype']}, AdamW{recomputed}: an update of {plan['batch_size']} samples is "
        f"{plan['devices']} × {plan['accumulation_steps']} (devices × accumulation_steps) of {shape}",
        "",
        f"| | {' | '.join(way.upper() for way in ways)} |",
        "|---" + "|---:" * len(ways) + "|",
    ]
    for term in plan["ddp"]:
        if any(plan[way][term] for way in ways):
            lines.append(f"| {term} | " + " | ".join(_readable(plan[way][term]) for way in ways) + " |")
    return "\n".join(lines)


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _check(**numbers: int | tuple[int, int]) -> None:
    for name, given in numbers.items():
        value, least = given if isinstance(given, tuple) else (given, 1)
        if value < least:
            raise UserError(f"{name}: got {value}, expected at least {least}")


def _with_states(model: nn.Module, activations: int, shards: int, optimizer_states: int, average: bool) -> Memory:
    """In float32, whatever autocast does; buffers, a few kB, are left out."""
    weights = _bytes(model.parameters())
    blocks = [_bytes(block.parameters()) for block in blocks_of(model)]
    # FSDP gathers a block's weights and holds its gradient whole; what is outside the blocks stays gathered
    gathered = weights - sum(blocks) + 2 * max(blocks, default=0) if shards > 1 else 0
    share = -(-weights // shards)
    return Memory(share, share, optimizer_states * share, average * share, gathered, activations)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(4 * tensor.numel() for tensor in tensors)


def _fake_copy(model: nn.Module) -> nn.Module:
    """In training mode, on a CPU that is not there, and without a copy of the weights."""
    fakes: dict[int, Any] = {id(t): torch.empty(t.shape, dtype=t.dtype) for t in model.buffers()}
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        fakes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    return copy.deepcopy(model, fakes).train()  # deepcopy takes what it finds there for copied already


def _recompute_first(model: nn.Module, share: float) -> None:
    """As the engine does, for any model that has blocks."""
    blocks = blocks_of(model)
    recompute_blocks(blocks[: round(share * len(blocks))])


class _LiveBytes(TorchDispatchMode):
    """Sums the storages that operations make, each from the first tensor on it until the last is gone."""

    def __init__(self, ignored: Iterable[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata: 0 for tensor in ignored}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, Tensor) and (key := output.untyped_storage()._cdata) not in self.known:
                storage = output.untyped_storage()
                self.known[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.now)
        return outputs

    def _free(self, key: int) -> None:
        self.now -= self.known.pop(key)
