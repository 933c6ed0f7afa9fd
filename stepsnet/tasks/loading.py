"""The loader of every task whose samples are pictures: the same batches with any number of workers."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["loaded"]


@contextmanager
def loaded(
    samples: Dataset, device: torch.device, workers: int, batches: int, **settings: Any
) -> Iterator[Iterator[Any]]:
    """The batches of a loader that neither draws from the run's generator nor takes its signals.

    Its workers end with the ``with`` block, in whatever way that is left. They take no SIGTERM, with which Python
    ends what is left of them when it exits: it would wait for them for ever.

    Args:
        workers: processes that decode and augment, at most one for each of so many ``batches``.
        **settings: DataLoader's, such as ``batch_sampler``.
    """
    loader: DataLoader = DataLoader(
        samples,
        num_workers=min(workers, batches),
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator().manual_seed(0),  # else it would draw from the run's
        **settings,
    )
    others = multiprocessing.active_children()
    try:
        found = iter(loader)
    except BaseException:  # some of the workers could not be started
        _end(_all_but(others))
        raise
    started = _all_but(others)
    try:
        yield found
    finally:
        # torch does it when the iterator is collected, which whatever keeps a traceback puts off
        if shut_down := getattr(found, "_shutdown_workers", None):  # there are workers
            shut_down()
        _end(started)


def _all_but(others: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child not in others]


def _end(workers: Sequence[BaseProcess]) -> None:
    """Those that torch has not ended in some seconds, as where a file system does not answer."""
    for worker in workers:
        worker.kill()
        worker.join()


def _leave_signals_to_the_run(worker: int) -> None:
    # a terminal sends Ctrl-C to the workers too, and torchrun and schedulers SIGTERM; the run ends them when it is done
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
