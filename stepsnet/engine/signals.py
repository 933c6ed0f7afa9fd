"""SIGINT and SIGTERM as something to look at between two updates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["signals_caught"]


@contextmanager
def signals_caught() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that a whole update and a checkpoint come before the end."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, lambda received, frame: caught.append(received)) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
