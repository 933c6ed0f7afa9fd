"""The memory that training takes on one device, in bytes, predicted without a device.

Weights, gradients, optimizer states and averaged weights follow from the number of parameters. Activations
have no short formula that holds for all families. Therefore one forward and backward pass is run on fake tensors,
which have shapes, dtypes and lifetimes but no data, and the largest sum of the storages that are alive at the same
time is kept. This counts what hooks on saved tensors miss: the inputs that gradient checkpointing keeps and the
block that it recomputes, the casts of autocast, and gradients before they are accumulated.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..device import autocast, check_amp_dtype
from ..errors import UserError, nearest
from ..macs import held_tensors
from ..models.blocks import blocks_of, blocks_to_recompute, recompute_blocks
from ..output.markdown import markdown_table
from ..output.terminal import silenced

__all__ = [
    "Memory",
    "activation_bytes",
    "peak_bytes",
    "plan_memory",
    "readable_bytes",
    "render_memory",
    "states_memory",
    "sum_of_outputs",
]


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
        """The sum in bytes: the peak if gradients are accumulated, and otherwise an upper bound of it.

        In the first backward pass of an update, gradients arrive while activations are freed.
        """
        return sum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, int]:
        """The terms and their ``total``, in bytes."""
        return {**asdict(self), "total": self.total}


def activation_bytes(
    model: nn.Module,
    input_size: tuple[int, ...],
    micro_batch: int,
    grad_checkpointing: float = 0.0,
    amp_dtype: str = "float32",
) -> int:
    """Peak bytes of a forward and backward pass beyond the inputs, weights, buffers and kept gradients.

    Shape: the model takes (``micro_batch``, *``input_size``) and returns one tensor, or a tuple of them. Attention is
    counted as the fused kernel that never holds the N×N scores, and autocast by its list for CPUs, which differs from
    the one for GPUs in a few small operations.

    Args:
        model: on any device, including the meta device; it is not changed.
        input_size: the shape of one sample, such as (3, 224, 224).
        micro_batch: samples per forward pass on one device.
        grad_checkpointing: the share of the blocks, from the first on, that the backward pass recomputes.
        amp_dtype: the dtype of the forward pass under autocast: float32, bfloat16 or float16.

    Raises:
        UserError: a number out of range, an unknown ``amp_dtype``, or no blocks that could be recomputed.
    """
    _check(micro_batch=micro_batch)
    if not 0 <= grad_checkpointing <= 1:
        raise UserError(f"grad_checkpointing: got {grad_checkpointing}, expected 0 to 1")
    check_amp_dtype(amp_dtype)

    return peak_bytes(
        model,
        torch.empty(micro_batch, *input_size, device="meta"),
        lambda model, inputs: sum_of_outputs(model(inputs)),
        lambda model: recompute_blocks(blocks_to_recompute(model, grad_checkpointing)),
        amp_dtype,
    )


def sum_of_outputs(output: Any) -> Tensor:
    """A loss for a model without one: the sum of its outputs or, if it returns a mapping, of the first entry."""
    output = next(iter(output.values())) if isinstance(output, Mapping) else output
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return torch.stack([one.float().sum() for one in outputs]).sum()


def peak_bytes(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    recompute: Callable[[nn.Module], None],
    amp_dtype: str = "float32",
) -> int:
    """Peak bytes of ``loss(model, batch)`` and its backward pass, without what :func:`activation_bytes` leaves out.

    Args:
        model: on any device; it is not changed.
        batch: tensors on any device, or tuples, lists and dictionaries of them; their values are not read.
        recompute: called with a copy of the model, in which it marks what the backward pass recomputes.

    Raises:
        Exception: whatever torch raises for a loss whose control flow depends on values, such as a detector's.
    """
    with silenced("torch._subclasses.fake_tensor"), FakeTensorMode():
        model, batch = _fake_copy(model), tree_map_only(Tensor, _fake, batch)
        recompute(model)
        for parameter in model.parameters():
            # gradients have a term of their own; here they live as long as it takes to add them up
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        given = (one for one in tree_leaves(batch) if isinstance(one, Tensor))
        with _LiveBytes((*given, *model.parameters(), *model.buffers())) as live:
            with autocast(amp_dtype, torch.device("cpu")):
                value = loss(model, batch)
            value.backward()
    return live.peak


def states_memory(
    model: nn.Module, *, optimizer_states: float = 2, average: bool = False, shards: int = 1, activations: int = 0
) -> Memory:
    """Bytes of weights, gradients, optimizer states and averages in float32, whatever autocast does.

    Frozen weights have neither gradients nor states. Not included: buffers (a few kB), the device's context, cached
    memory that its allocator cannot reuse, and workspaces of kernels.

    Args:
        optimizer_states: numbers that the optimizer keeps for each parameter: 2 for AdamW and LAMB, 1 for SGD with
            momentum.
        average: whether an exponential moving average of the weights is kept.
        shards: the number of devices that FSDP shards over. DDP, whose gradients are views of its buckets, takes as
            much on each of several devices as on one.
        activations: what :func:`peak_bytes` returns.
    """
    weights, trained = _bytes(model.parameters()), _bytes(p for p in model.parameters() if p.requires_grad)
    blocks = [_bytes(block.parameters()) for block in blocks_of(model)]
    # FSDP gathers one block's weights and holds its unsharded gradient; parameters outside the blocks stay gathered
    gathered = weights - sum(blocks) + 2 * max(blocks, default=0) if shards > 1 else 0
    share, of_trained = -(-weights // shards), -(-trained // shards)
    return Memory(share, of_trained, round(optimizer_states * of_trained), average * share, gathered, activations)


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
    """Bytes per device under DDP, and with ``shard`` also under FSDP, for a timm model's own input size and AdamW.

    Args:
        name: a timm or StepsNet model.
        batch_size: samples per update, over all devices and accumulated parts.

    Raises:
        UserError: as :func:`activation_bytes`; a name that timm does not know; a batch that is not a multiple of
            devices × accumulation_steps.
    """
    _check(batch_size=batch_size, devices=devices, accumulation_steps=accumulation_steps)
    parts = devices * accumulation_steps
    if batch_size % parts:
        raise UserError(
            f"batch_size: got {batch_size}, expected a multiple of {parts} "
            f"({devices} devices × {accumulation_steps} accumulation_steps)"
        )
    micro_batch = batch_size // parts
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
        **{
            way: states_memory(model, average=average, shards=shards, activations=activations).as_dict()
            for way, shards in ways.items()
        },
    }


def render_memory(plan: dict[str, Any]) -> str:
    """:func:`plan_memory`'s result as a Markdown table in MiB and GiB, one row per term."""
    ways = [way for way in ("ddp", "fsdp") if way in plan]
    shape = "×".join(map(str, (plan["micro_batch"], *plan["input_size"])))
    recomputed = f", {plan['grad_checkpointing']:.0%} of the blocks checkpointed" if plan["grad_checkpointing"] else ""
    title = (
        f"{plan['model']}, {plan['amp_dtype']}, AdamW{recomputed}: an update of {plan['batch_size']} samples is "
        f"{plan['devices']} × {plan['accumulation_steps']} (devices × accumulation_steps) of {shape}"
    )
    terms = [term for term in plan["ddp"] if any(plan[way][term] for way in ways)]
    rows = [[term, *(readable_bytes(plan[way][term]) for way in ways)] for term in terms]
    table = markdown_table(["", *(way.upper() for way in ways)], rows, "l" + "r" * len(ways))
    return f"{title}\n\n{table}"


def readable_bytes(size: int) -> str:
    """A size such as ``1.25 GiB`` or, below 1 GiB, ``12.3 MiB``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name}: got {value}, expected at least 1")


def _fake(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, without the values; in FakeTensorMode it is fake."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(4 * tensor.numel() for tensor in tensors)


def _fake_copy(model: nn.Module) -> nn.Module:
    """A copy in training mode whose tensors are fake: on the CPU, without memory."""
    fakes: dict[int, Any] = {}
    for tensor in held_tensors(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        fakes[id(tensor)] = nn.Parameter(_fake(tensor), tensor.requires_grad) if is_parameter else _fake(tensor)
    return copy.deepcopy(model, fakes).train()  # deepcopy does not copy what this memo holds


class _LiveBytes(TorchDispatchMode):
    """Sums the bytes of the storages that operations allocate, each for as long as a tensor uses it."""

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
