"""What is recorded beside every result: hardware, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError
from ..machine import cores
from ..output.redact import public_command
from ..settings.user_modules import module_versions
from .records import metrics_text

if TYPE_CHECKING:
    import torch

__all__ = [
    "command_line",
    "joined",
    "provenance",
    "provenance_of",
    "recorded_command",
    "trained_before",
    "write_process",
]

_PROCESSES = "processes.jsonl"  # in a run's folder: a line for each process that has trained it
_OF_A_RESULT = ("commit", "hardware", "versions")
_RANKS = "ranks"  # missing in lines of an earlier version

_command: ContextVar[Sequence[str] | None] = ContextVar("command", default=None)


@contextmanager
def recorded_command(*arguments: str) -> Iterator[None]:
    """Record ``stepsnet ARGUMENTS`` as the command that the results of this block come from.

    This is for callers other than the command line, whose ``sys.argv`` says nothing.
    """
    token = _command.set(arguments)
    try:
        yield
    finally:
        _command.reset(token)


def command_line() -> str:
    """The command of this process, without anything that says where files are on this machine."""
    return public_command(shlex.join(["stepsnet", *(_command.get() or sys.argv[1:])]))


def provenance(device: torch.device | None = None, imports: Sequence[str] = ()) -> dict[str, Any]:
    """Hardware, versions, commit and command, without absolute paths.

    Args:
        device: the device that was computed on; a GPU that was there and not used is not named.
        imports: the recipe's modules, whose checksums are among the versions.
    """
    import torch

    uses_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return {
        "command": command_line(),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu(),
            "cores": cores(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpu": torch.cuda.get_device_name(device) if uses_gpu else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "timm")},
            "stepsnet": __version__,  # its source may run without being installed
            **module_versions(imports),
        },
    }


def write_process(folder: Path, updates_done: int, made_with: dict[str, Any]) -> None:
    """Record in a run's folder what trains it from now on, after ``updates_done`` updates.

    Raises:
        UserError: it cannot be written.
    """
    file = folder / _PROCESSES
    try:
        whole = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")  # else a full disk cut off a line
        with file.open("a", encoding="utf-8") as lines:
            lines.write("\n" * (not whole) + json.dumps({"from_update": updates_done, **made_with}) + "\n")
    except OSError as error:
        raise UserError(f"--run: cannot write {file}: {error.strerror or error}") from None


def trained_before(folder: Path, made_with: dict[str, Any]) -> list[dict[str, Any]]:
    """The earlier parts of a run that were trained with another commit, hardware, versions or number of ranks.

    They are compared with ``made_with``, that of the current process. Each part has the updates after ``from_update``,
    up to and including ``until_update``. Updates that were trained again, because no checkpoint had them, belong to the
    later part.
    """
    lines, found = _read_processes(folder), []
    for number, (begun, part) in enumerate(lines[:-1]):
        until = min(later for later, _ in lines[number + 1 :])
        if until > begun and any(made_with.get(key) != value for key, value in part.items()):
            found.append({"from_update": begun, "until_update": until, **part})
    return joined(found)


def joined(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a run, with consecutive parts joined that differ in nothing but their updates.

    A part from an earlier version has no ``from_update``: it is taken to follow the one before it.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        until = found[-1]["until_update"] if found else None
        follows = found and part.get("from_update", until) == until
        if follows and _without_updates(part) == _without_updates(found[-1]):
            found[-1]["until_update"] = part["until_update"]
        else:
            found.append(dict(part))
    return found


def _without_updates(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("from_update", "until_update")}


def provenance_of(folder: Path) -> dict[str, Any]:
    """Commit, hardware, versions and ranks of the last process that has trained a run; nothing if they are unknown.

    ``trained_before`` is among them if others have trained it before.
    """
    lines = _read_processes(folder)
    if not lines:
        return {}
    before = trained_before(folder, lines[-1][1])
    return lines[-1][1] | ({"trained_before": before} if before else {})


def _read_processes(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """For each process that has trained a run: the update that it began with, and what it was."""
    lines = []
    for text in metrics_text(folder / _PROCESSES):
        with suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            part = {key: line[key] for key in _OF_A_RESULT}
            part |= {_RANKS: line[_RANKS]} if _RANKS in line else {}
            lines.append((int(line["from_update"]), part))
    return lines


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

    An installed package may lie in a repository of the user's, such as in its ``.venv``, which does not track it.
    ``STEPSNET_COMMIT`` names the commit of a copied tree, which git may not know, or may have at another commit.
    """
    if given := os.environ.get("STEPSNET_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        root = Path(__file__).parent.parent.parent
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", str(Path(__file__)))
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "stepsnet")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
