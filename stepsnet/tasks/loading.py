"""The loader of every task that reads images."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..engine.interrupt import SIGNALS
from ..errors import UserError, in_a_line

__all__ = ["loaded"]


@contextmanager
def loaded(
    samples: Dataset, device: torch.device, workers: int, batches: int, **settings: Any
) -> Iterator[Iterator[Any]]:
    """Load batches and move their tensors to ``device``; the same batches with any number of workers.

    The loader draws nothing from the run's random generators, and its workers ignore the run's signals. The workers
    end with the ``with`` block, however it is left: they ignore SIGTERM, which Python sends to remaining workers when
    it exits, so it would wait for them forever.

    Args:
        workers: processes that decode and augment; no more than ``batches`` are started.
        batches: the number of batches that will be loaded.
        **settings: further arguments of DataLoader, such as ``batch_sampler``.

    Raises:
        UserError: a worker was killed, there is no shared memory for its batches, or reading a sample raised one.
    """
    workers = min(workers, batches)
    loader: DataLoader = DataLoader(
        samples,
        num_workers=workers,
        multiprocessing_context=_start_method() if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_prepare_worker,
        generator=torch.Generator().manual_seed(0),  # otherwise it would draw from the run's generator
        **settings,
    )
    loader.collate_fn = _Shared(loader.collate_fn)

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    others = multiprocessing.active_children()
    try:
        found = iter(loader)
    except BaseException:  # some of the workers could not be started
        _end(_all_but(others))
        raise
    started = _all_but(others)
    try:
        yield (tree_map_only(Tensor, to_device, batch) for batch in _naming_what_failed(found))
    finally:
        # torch does this when the iterator is collected, which a kept traceback delays
        if shut_down := getattr(found, "_shutdown_workers", None):  # there are workers
            shut_down()
        _end(started)


class _Shared:
    """A collate function that also moves the batch to shared memory if it runs in a worker.

    Torch would do that in a thread of the worker, which loses the batch if the memory is full: the run would wait for
    it forever.
    """

    def __init__(self, collate: Callable[[Any], Any]):
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        return tree_map_only(Tensor, Tensor.share_memory_, batch) if get_worker_info() else batch


def _start_method() -> str | None:
    """Fork on Linux, whatever Python's default, because forked workers start at once.

    None leaves the choice to torch: on other systems, or if a start method has been set.
    """
    return "fork" if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None else None


def _naming_what_failed(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches. Raises UserError if a worker was killed, ran out of shared memory, or raised one itself."""
    try:
        yield from batches
    except UserError as error:
        # torch puts a worker's traceback before the message
        *traceback, said = str(error.args[0]).split(f"\n{type(error).__module__}.{type(error).__qualname__}: ")
        raise (UserError(said.rstrip("\n")) if traceback else error) from None
    except RuntimeError as error:
        said = in_a_line(error)
        if "shared memory" in said or "Bus error" in said:
            raise UserError(
                "workers: shared memory (/dev/shm) is full, expected more of it (such as `docker run --shm-size=8g`) "
                "or workers=0"
            ) from error
        if "DataLoader worker" in said and ("exited unexpectedly" in said or "killed by signal" in said):
            raise UserError(
                "workers: a process that loads data was killed, perhaps for lack of memory, expected fewer of them "
                f"({said[:150]})"
            ) from error
        raise


def _all_but(others: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child not in others]


def _end(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers that torch has not ended within a few seconds, for example because a file system hangs."""
    for worker in workers:
        worker.kill()
        worker.join()


def _prepare_worker(worker: int) -> None:
    # garbage collection would write to the header of each record of the data, so each worker would copy them all
    gc.freeze()
    # a terminal sends Ctrl-C and its hangup to the workers too, and torchrun and schedulers send them SIGTERM; the run
    # ends its workers itself
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
