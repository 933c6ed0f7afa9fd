"""``metrics.jsonl``: a line per event, cut back on resuming to what the checkpoint knows of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tracking import Tracker, scalars

__all__ = ["MetricsLog"]


class MetricsLog:
    """The lines of a run, and the trackers that get their numbers too."""

    def __init__(self, path: Path, known_bytes: int, writes: bool, trackers: Sequence[Tracker] = ()):
        """
        Args:
            known_bytes: the length that the file had when the checkpoint was written.
            writes: False on all ranks but the first, which write nothing.
        """
        self.path, self.writes, self.trackers = path, writes, trackers
        if writes:
            path.touch()
            with path.open("r+") as file:
                file.truncate(known_bytes)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.writes else 0

    def add(self, line: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            for track in self.trackers:
                track(scalars(line), line["step"])

    def last_epoch(self) -> dict[str, float]:
        """The metrics of the last epoch, by their keys."""
        if not self.writes:
            return {}
        lines = [json.loads(text) for text in self.path.read_text().splitlines()]
        last: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "epoch"), {})
        return {name: value for name, value in last.items() if name.startswith(("train_", "val_"))}
