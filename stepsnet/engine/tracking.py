"""Trackers of metrics: TensorBoard if it is installed, trackio or Weights & Biases on request.

``metrics.jsonl`` is the record; what a tracker has not sent yet is lost if the process is killed.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ..errors import UserError, import_extra, in_a_line
from ..files.writing import write_atomically

__all__ = ["Tracker", "open_trackers", "scalars"]


@dataclass(frozen=True)
class Tracker:
    """A place that metrics are sent to."""

    name: str
    track: Callable[[Mapping[str, float], int], object]  # values by name, step
    close: Callable[[bool], object]  # whether the training has failed


def open_trackers(tracker: str | None, folder: Path, step: int, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the trackers that get the metrics from ``step`` on.

    Args:
        tracker: "tensorboard", "trackio", "wandb" or None. TensorBoard is always used if it is installed and works;
            "tensorboard" makes it required.

    Raises:
        UserError: ``tracker`` is not installed, or does not start.
    """
    opened = []
    with nullcontext() if tracker == "tensorboard" else suppress(Exception):  # if nobody has asked for it
        import_extra("tensorboard", "tracker")
        opened.append(_tensorboard(folder / "tensorboard", step))
    if tracker in ("trackio", "wandb"):
        opened.append(_service(tracker, folder, _name_of(folder), config))
    return opened


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics, without its step and epoch."""
    numbers = {name: value for name, value in line.items() if isinstance(value, Real)}
    return {name: float(value) for name, value in numbers.items() if name not in ("step", "epoch")}


def _tensorboard(folder: Path, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _without_tensorboards
    try:
        writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
    except OSError as error:
        raise UserError(f"tracker: cannot write {folder}: {error.strerror or error}") from error

    def track(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker("tensorboard", track, lambda failed: writer.close())


def _without_tensorboards(arguments: Any, print_it: Callable[[Any], object] = threading.excepthook) -> None:
    """Print a thread's error, but not TensorBoard's: the next call raises those, such as that of a full disk."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        print_it(arguments)


def _name_of(folder: Path) -> str:
    """The name of the run in a folder among all runs of a user, kept in ``tracker.txt``.

    The folder's own name would not do: every comparison has a ``stepsnet-seed0``, and a folder may move.
    """
    file = folder / "tracker.txt"
    if not file.exists():
        write_atomically(file, f"{folder.name}-{secrets.token_hex(4)}")
    return file.read_text(encoding="utf-8").strip()


def _service(tracker: str, folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    """trackio or wandb, whose calls are the same; a resumed run is found again by its name."""
    service = import_extra(tracker, "tracker")
    own = {"embed": False} if tracker == "trackio" else {"id": name, "dir": str(folder)}
    try:
        run = service.init(project="stepsnet", name=name, config=dict(config), resume="allow", **own)
    except Exception as error:  # what a network or a missing key may raise
        raise UserError(f"tracker: {tracker} would not start: {in_a_line(error, 300)}") from None

    def close(failed: bool) -> None:  # else the next run of this process, as in a notebook, would be taken for this one
        run.finish(**({"exit_code": int(failed)} if tracker == "wandb" else {}))

    return Tracker(tracker, lambda values, step: run.log(dict(values), step=step), close)
