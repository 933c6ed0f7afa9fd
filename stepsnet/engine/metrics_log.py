"""``metrics.jsonl``: one line per event, cut back on resuming to what the checkpoint knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError, in_a_line
from ..files.writing import dump_json, write_atomically
from ..run_folder.records import metrics_text, parse_metrics
from .tracking import Tracker, scalars

__all__ = ["MetricsLog", "trim_log"]


class MetricsLog:
    """The lines of a run, and the trackers that also get their numbers; leaving ``with`` closes the trackers."""

    def __init__(
        self,
        path: Path,
        writes: bool,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], object] = lambda text: None,
    ):
        """
        Args:
            writes: False on all ranks but the first; they write nothing.
            say: called with a message when a tracker fails.
        """
        self.path, self.writes, self.trackers, self.say = path, writes, trackers, say
        self.working = list(trackers)
        self.size_bytes = 0  # kept here: if the file or its disk goes away, checkpoints can still be written
        with suppress(OSError):
            self.size_bytes = path.stat().st_size if writes else 0

    def add(self, line: dict[str, Any]) -> None:
        """Raises UserError if it cannot write, as on a full disk; a line written in part is cut off on resuming.

        A tracker that fails, such as a service that is down, gets no more lines of this run: the record is here.
        """
        if not self.writes:
            return
        try:
            with self.path.open("a") as file:
                # as null: the gradient norm is not finite in an update that float16 skips
                file.write(dump_json(line) + "\n")
                self.size_bytes = file.tell()
        except OSError as error:
            raise UserError(f"metrics: cannot write {self.path}: {error.strerror or error}") from error
        for tracker in tuple(self.working):
            try:
                tracker.track(scalars(line), line["step"])
            except Exception as error:  # whatever a service, its network or a full disk raises
                self.working.remove(tracker)
                said = f"{in_a_line(error)[:300]}; all of them are in {self.path}"
                self.say(f"tracker: {tracker.name} failed at update {line['step']} and gets no more metrics: {said}")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        for tracker in self.trackers:
            with suppress(Exception):  # what a network may raise: the record is here
                tracker.close(error is not None)


def trim_log(path: Path, known_bytes: int, step: int) -> str | None:
    """Cut a log back to the ``known_bytes`` that it had at the checkpoint of update ``step``.

    Lines that are missing or damaged are no reason to stop: weights do not depend on them. Those that can be read are
    kept, up to the update of the checkpoint.

    Returns:
        A message if lines are missing.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.touch()
        with path.open("r+b") as file:
            if path.stat().st_size > known_bytes:
                file.truncate(known_bytes)
                os.fsync(file.fileno())
        lines = metrics_text(path)
        kept = [line for line in lines if (entry := parse_metrics(line)) is not None and entry["step"] <= step]
        if path.stat().st_size == known_bytes and kept == lines:
            return None
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        return f"{path} has lost lines of the {step} updates so far: {len(kept)} are left, and the training goes on"
    except OSError as error:
        raise UserError(f"metrics: cannot write {path}: {error.strerror or error}") from error
