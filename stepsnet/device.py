"""What depends on the device a tensor is on: mixed precision, and memory, its size and the error of its end."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["AMP_DTYPES", "autocast", "host_memory", "is_out_of_memory"]

AMP_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def autocast(amp_dtype: str, device: torch.device) -> AbstractContextManager:
    """Run the forward pass in ``amp_dtype``; weights and updates stay in float32."""
    if amp_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp_dtype])


@lru_cache
def host_memory() -> int:
    """Bytes of the machine's memory that this process may use at most."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control groups, or "max"
        return min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return installed


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
