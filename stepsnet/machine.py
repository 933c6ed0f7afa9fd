"""The processor cores and memory that this process may use, and its place among the processes of ``torchrun``."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["available_memory", "cores", "host_memory", "is_main_process", "is_one_of_several"]

_LIMITS = Path("/sys/fs/cgroup")  # the limits of the control group, as in a container


def is_one_of_several() -> bool:
    """Whether ``torchrun`` has started this process beside others; RANK alone may have been set by anybody."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_process() -> bool:
    """Whether this process is alone or is rank 0, the only rank that prints."""
    return not is_one_of_several() or os.environ["RANK"] == "0"


def cores() -> int:
    """The cores of this process's affinity, but no more than its control group has processor time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control groups, or "max"
        quota, period = (_LIMITS / "cpu.max").read_text(encoding="ascii").split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


@lru_cache
def host_memory() -> int:
    """Memory in bytes, of the machine or, if that is less, of its control group."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(installed, int((_LIMITS / "memory.max").read_text(encoding="ascii")))
    return installed


def available_memory() -> float:
    """Memory in bytes that is free both on the machine and in its control group."""
    free: float = host_memory()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError, StopIteration):  # no control groups, or "max"
        limit, used = (int((_LIMITS / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        lines = (_LIMITS / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        free = min(free, limit - used + cached)
    return free
