"""SIGINT, SIGTERM and SIGHUP, which end a run after a checkpoint.

A signal is noticed at once and obeyed after the update, or, in an evaluation, before the next forward pass. A later
SIGINT is obeyed at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Stopped, UserError

__all__ = ["SIGNALS", "Interrupted", "catch_signals"]

if not hasattr(signal, "SIGHUP"):
    raise UserError("training: got Windows, expected Linux or macOS, such as Linux inside of Windows (WSL)")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# seconds within which one Ctrl-C may reach a process of torchrun's twice, from the terminal and from torchrun
_ONE_REQUEST = 1.0


class Interrupted(Stopped):
    """A signal ended a run, or several; each wrote a checkpoint first. ``status`` is 128 + the signal's number."""

    def __init__(self, number: int, step: int | None = None, folder: Path | None = None):
        after = f" after update {step}" if step is not None else ""
        how = f"`stepsnet resume {folder}`" if folder else "--resume"
        super().__init__(f"stopped by {signal.Signals(number).name}{after}; {how} goes on from there")
        self.status = 128 + number


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect the numbers of SIGINT, SIGTERM and SIGHUP (a terminal was closed) that come while the block runs.

    Raises:
        KeyboardInterrupt: Ctrl-C is pressed again; an update that waits for data may never end.
    """
    caught: list[int] = []
    requested: list[float] = []  # when Ctrl-C came

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        if number == signal.SIGINT:
            requested.append(time.monotonic())
            if requested[-1] - requested[0] > _ONE_REQUEST:
                raise KeyboardInterrupt

    numbers = list(SIGNALS) if threading.current_thread() is threading.main_thread() else []
    if numbers and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
        numbers.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
