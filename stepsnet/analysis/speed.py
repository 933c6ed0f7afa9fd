"""Speed and memory of several models (Fig. 6).

The timings of the models are interleaved, so that other load on the machine slows all of them alike.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from ..device import autocast, check_amp_dtype
from ..errors import UserError, is_out_of_memory
from ..machine import available_memory
from ..models.blocks import is_of_transformers
from ..models.compilation import paused
from ..models.cuda_graph import GraphedInference
from .memory import activation_bytes

__all__ = ["Measured", "measure_memory", "measure_speed", "measured_peak"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """A model to measure, and the shape of one sample: (C, H, W) for an image, (N,) for tokens."""

    name: str
    model: nn.Module
    shape: Shape
    vocabulary: int | None = None  # of the tokens; None for images
    optimized: nn.Module | None = None  # what is measured in inference, if that is another module

    def module_for(self, training: bool) -> nn.Module:
        return self.model if training or self.optimized is None else self.optimized


def measure_speed(
    models: Sequence[Measured],
    batch_size: int,
    rounds: int,
    device: torch.device,
    amp_dtype: str = "float32",
    train: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds per model in every round: ``inference`` and ``training`` of a batch, ``latency`` of one sample.

    Each round visits all models, starting with a different one than the round before. A training update is the forward
    and backward pass and AdamW's step. Two rounds of warm-up come first and are not recorded.

    Raises:
        UserError: an unknown ``amp_dtype``, or a batch that does not fit in memory.
    """
    check_amp_dtype(amp_dtype)
    timed: dict[str, dict[str, _Inference]] = {}
    for measured in models:
        net = measured.module_for(training=False).to(device)
        many, one = (_sample(measured, size, device) for size in (batch_size, 1))
        timed[measured.name] = {
            "inference": _Inference(net, many, amp_dtype),
            "latency": _Inference(net, one, amp_dtype),
        }
        if train:
            timed[measured.name]["training"] = _Training(measured.model.to(device), many, amp_dtype)
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name, kinds in timed.items()}
    names = list(timed)
    for number in range(-2, rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            for kind, function in timed[name].items():
                elapsed = _time(function, device, f"{name}: a batch of {batch_size}")
                if number >= 0:
                    seconds[name][kind].append(elapsed)
        note(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
    return seconds


def measure_memory(
    measured: Measured, batch_sizes: tuple[int, int], device: torch.device, amp_dtype: str, train: bool = True
) -> dict[str, dict[str, float]]:
    """Peak bytes of inference and of a training update at two batch sizes, and the change per sample between them.

    The change per sample is what the paper reports (Fig. 6d, from 32 to 64): weights and optimizer states cancel.
    The peak is that of the call, minus what was held before it, since other models may be on the device.

    Raises:
        UserError: batch sizes that do not increase, or a batch predicted not to fit.
    """
    small, large = batch_sizes
    if not 0 < small < large:
        raise UserError(f"memory: got batches of {small} and {large}, expected two that increase")
    if device.type == "cpu" and train and measured.vocabulary is None:
        needed, free = activation_bytes(measured.model, measured.shape, large, amp_dtype=amp_dtype), available_memory()
        if needed > 0.9 * free:
            raise UserError(
                f"memory: {measured.name} is predicted to take {needed / 2**30:.1f} GiB in training at a batch of "
                f"{large}, but only {free / 2**30:.1f} GiB are free: expected smaller batches, or no training"
            )
    kinds: dict[str, type[_Inference]] = {"inference": _Inference, "training": _Training}
    found = {}
    for kind, made in kinds.items():
        if kind == "training" and not train:
            continue
        net, peaks = measured.module_for(made.training).to(device), []
        for size in batch_sizes:
            function = made(net.train(made.training), _sample(measured, size, device), amp_dtype)
            with paused(net, GraphedInference):  # a replay allocates nothing, and a capture more than any call
                function()  # allocates the optimizer's states and the kernels' plans
                gc.collect()
                peaks.append(measured_peak(function, device))
            del function
        found[kind] = {
            str(small): peaks[0],
            str(large): peaks[1],
            "per_sample": (peaks[1] - peaks[0]) / (large - small),
        }
    return found


def measured_peak(function: Callable[[], None], device: torch.device) -> int:
    """The peak of a call in bytes of tensors, beyond what was held before, according to the device's allocator.

    Raises:
        UserError: a device that is neither CUDA nor the CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise UserError(f"memory: cannot be measured on {device.type}, expected device cpu or cuda, or --memory 0")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts, and that there is no GPU
    with profile(profile_memory=True) as found:
        function()
    changes = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))  # negative where memory is given back


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _sample(measured: Measured, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if measured.vocabulary is not None:
        return torch.randint(measured.vocabulary, (size, *measured.shape), generator=generator).to(device)
    return torch.randn(size, *measured.shape, generator=generator).to(device)


class _Inference:
    """Forward passes on one batch."""

    training = False

    def __init__(self, model: nn.Module, x: Tensor, amp_dtype: str):
        self.model, self.x, self.amp_dtype = model, x, amp_dtype

    def __call__(self) -> None:
        with torch.inference_mode(), autocast(self.amp_dtype, self.x.device):
            self.model(self.x)


class _Training(_Inference):
    """Updates on one batch; the first one creates the optimizer."""

    training = True

    def __init__(self, model: nn.Module, x: Tensor, amp_dtype: str):
        super().__init__(model, x, amp_dtype)
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        with autocast(self.amp_dtype, self.x.device):
            if is_of_transformers(self.model):
                loss = self.model(self.x, labels=self.x).loss
            else:
                found = self.model(self.x)  # (B, classes); two of (B, classes, H, W) for a segmenter
                outputs = found if isinstance(found, tuple) else (found,)
                loss = torch.stack([_cross_entropy(logits) for logits in outputs]).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _cross_entropy(logits: Tensor) -> Tensor:
    labels = torch.zeros(len(logits), *logits.shape[2:], dtype=torch.long, device=logits.device)
    return nn.functional.cross_entropy(logits.float(), labels)


def _time(function: _Inference, device: torch.device, what: str) -> float:
    function.model.train(function.training)  # not timed: a deep model has so many modules that this takes a millisecond
    try:
        _synchronize(device)
        started = time.perf_counter()
        function()
        _synchronize(device)
        return time.perf_counter() - started
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(f"memory: {what} does not fit ({str(error).splitlines()[0]})") from None
        raise
