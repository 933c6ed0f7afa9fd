"""The loader of every task whose samples are pictures: the same batches with any number of workers."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["make_loader"]


def make_loader(samples: Dataset, device: torch.device, workers: int, batches: int, **settings: Any) -> DataLoader:
    """A loader that neither draws from the run's generator nor takes its signals.

    Args:
        workers: processes that decode and augment, at most one for each of so many ``batches``.
        **settings: DataLoader's, such as ``batch_sampler``.
    """
    return DataLoader(
        samples,
        num_workers=min(workers, batches),
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator().manual_seed(0),  # else it would draw from the run's
        **settings,
    )


def _leave_signals_to_the_run(worker: int) -> None:
    # a terminal sends Ctrl-C to the workers too, and torchrun and schedulers SIGTERM; the run ends them when it is done
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
