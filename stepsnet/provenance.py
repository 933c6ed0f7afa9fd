"""What is recorded beside every result: hardware, versions, commit and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import __version__
from .machine import cores
from .redact import public_command

__all__ = ["command_line", "provenance", "recorded_command"]

_command: ContextVar[Sequence[str] | None] = ContextVar("command", default=None)


@contextmanager
def recorded_command(*arguments: str) -> Iterator[None]:
    """Record ``stepsnet ARGUMENTS``, in this block, as the command that results come from.

    For what is not called from the command line, and whose ``sys.argv`` says nothing.
    """
    token = _command.set(arguments)
    try:
        yield
    finally:
        _command.reset(token)


def command_line() -> str:
    """The command that this process is, without what says where on this machine files are."""
    return public_command(shlex.join(["stepsnet", *(_command.get() or sys.argv[1:])]))


def provenance() -> dict[str, Any]:
    """Hardware, versions, commit and command, without absolute paths."""
    import torch

    return {
        "command": command_line(),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu(),
            "cores": cores(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "timm")},
            "stepsnet": __version__,  # its source may run without being installed
        },
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree, with a plus if it was changed since; None for an installed package.

    An installed one may lie in a repository of the user's, such as in its ``.venv``, which does not track it.
    ``STEPSNET_COMMIT`` names the commit for a copy of the tree that git does not know.
    """

    def git(*arguments: str) -> str:
        root = Path(__file__).parent.parent
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", str(Path(__file__)))
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "stepsnet")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("STEPSNET_COMMIT")
