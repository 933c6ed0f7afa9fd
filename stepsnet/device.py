"""What depends on the device a tensor is on: mixed precision, and the error that says memory is exhausted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["AMP_DTYPES", "autocast", "is_out_of_memory"]

AMP_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def autocast(amp_dtype: str, device: torch.device) -> AbstractContextManager:
    """Run the forward pass in ``amp_dtype``; weights and updates stay in float32."""
    if amp_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp_dtype])


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
