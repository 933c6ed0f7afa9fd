"""Exported files as functions of a tensor, in the runtime of their format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, import_extra
from .formats import FORMATS, format_of

__all__ = ["RUNTIMES", "Session", "check_runtime", "open_session"]

RUNTIMES = tuple(sorted((one.runtime for one in FORMATS.values()), key=lambda name: name != "torch"))

Session = Callable[[Tensor], list[Tensor]]


def check_runtime(name: str, device: torch.device, amp_dtype: str = "float32") -> None:
    """Raises UserError if a runtime is unknown or not installed, or lacks this device or this precision."""
    if name not in RUNTIMES:
        raise UserError(f"--runtime: got {name!r}, expected one or more of {','.join(RUNTIMES)}")
    if name == "torch":
        if device.type != "cpu" or amp_dtype != "float32":
            raise UserError(
                f"torch: got the device {device} and {amp_dtype} for an exported file, expected cpu and float32"
            )
        return
    package = import_extra(name)
    if name == "openvino":
        if device.type != "cpu":
            raise UserError(f"openvino: got the device {device}, expected cpu: it has no CUDA (--device cpu)")
        if amp_dtype == "float16":
            raise UserError("openvino: got amp_dtype float16 on a CPU, expected float32 or bfloat16")
        return
    if amp_dtype != "float32":
        raise UserError(f"onnxruntime: got amp_dtype {amp_dtype}, expected float32, the precision of the file")
    provider = _PROVIDERS.get(device.type)
    if provider not in package.get_available_providers():
        raise UserError(
            f"onnxruntime: got the device {device}, expected cpu, or `pip install onnxruntime-gpu` for cuda"
        )


def open_session(path: Path, device: torch.device | None = None, amp_dtype: str = "float32") -> Session:
    """Load an exported model; it computes with torch's number of threads.

    Raises:
        UserError: as for :func:`check_runtime`.
    """
    device = device or torch.device("cpu")
    form = format_of(path)
    check_runtime(form.runtime, device, amp_dtype)
    return _OPEN[form.name](path, device, amp_dtype)


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def _open_onnx(path: Path, device: torch.device, amp_dtype: str) -> Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised anyway
    # threads that spin while they wait would take time from the other runtimes in an interleaved measurement
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=[_PROVIDERS[device.type]])
    (taken,) = session.get_inputs()

    def run(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(found) for found in session.run(None, {taken.name: x.cpu().numpy()})]

    return run


def _open_openvino(path: Path, device: torch.device, amp_dtype: str) -> Session:
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[amp_dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",  # one request at a time, as in the others
    }
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)

    def run(x: Tensor) -> list[Tensor]:
        found = compiled(x.numpy())
        return [torch.from_numpy(found[output]) for output in compiled.outputs]

    return run


def _open_torch(path: Path, device: torch.device, amp_dtype: str) -> Session:
    program: Any = torch.export.load(str(path)).module()

    def run(x: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return list(program(x))

    return run


_OPEN = {"onnx": _open_onnx, "openvino": _open_openvino, "torch": _open_torch}
