"""What this process may use of its machine: processor cores and memory."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["cores", "host_memory"]

_LIMITS = Path("/sys/fs/cgroup")  # of the control group, as in a container


def cores() -> int:
    """Those of its affinity, and no more than its control group has processor time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control groups, or "max"
        quota, period = (_LIMITS / "cpu.max").read_text(encoding="ascii").split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


@lru_cache
def host_memory() -> int:
    """Bytes, of the machine or of its control group."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(installed, int((_LIMITS / "memory.max").read_text(encoding="ascii")))
    return installed
