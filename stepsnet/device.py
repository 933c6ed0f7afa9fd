"""Devices by their names, and mixed precision on them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import UserError

__all__ = ["AMP_DTYPES", "autocast", "check_amp_dtype", "pick_device", "pick_device_of_run"]

AMP_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def autocast(amp_dtype: str, device: torch.device) -> AbstractContextManager:
    """Run the forward pass in ``amp_dtype``; weights and updates stay in float32."""
    if amp_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp_dtype])


def check_amp_dtype(amp_dtype: str) -> None:
    """Raises UserError for an unknown name."""
    if amp_dtype not in AMP_DTYPES:
        raise UserError(f"amp_dtype: got {amp_dtype!r}, expected one of {', '.join(AMP_DTYPES)}")


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is an accelerator if there is one. Raises UserError if it is not available."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    if name == "meta":
        raise UserError("device: got 'meta', expected a device that computes, such as cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: got {name!r}, expected an available device: {str(error).splitlines()[0]}") from None
    if device.type == "cpu" and torch.device(name).index:  # torch takes any number
        raise UserError(f"device: got {name!r}, expected cpu: there is only one")
    return torch.device(name)


def pick_device_of_run(name: str) -> torch.device:
    """The device that a run was trained on or, if it is not there, as on another machine, that of "auto"."""
    try:
        return pick_device(name)
    except UserError:
        return pick_device("auto")
