"""An exported model in place of the torch module that it was made from, for `stepsnet bench` to measure."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..settings.config import ModelSpec
from .export import write_checked
from .formats import FORMATS
from .sessions import Session, check_runtime, open_session
from .source import described

__all__ = ["SessionModule", "in_runtime"]


class SessionModule(nn.Module):
    """A session as a module without weights, for inference."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session

    def forward(self, x: Tensor) -> Tensor:
        return self.session(x)[0]


def in_runtime(spec: ModelSpec, model: nn.Module, runtime: str, device: torch.device, amp_dtype: str) -> SessionModule:
    """A model in another runtime than torch, checked against torch; if it takes pictures, only the batch is open.

    Raises:
        UserError: the runtime is not installed, does not support the device or the precision, or cannot hold the
            model with the batch open.
    """
    form = next(one for one in FORMATS.values() if one.runtime == runtime)
    check_runtime(runtime, device, amp_dtype)
    form.require()
    source = described(spec.name, model, True, spec.args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{form.suffix}"
        _, lines = write_checked(source, form, path, fixed_size=source.use.task != "language")
        if fixed := next((line for line in lines if "batch" in line), None):
            raise UserError(f"{runtime}: {spec.name} cannot be measured, since {fixed}")
        return SessionModule(open_session(path, device, amp_dtype))
