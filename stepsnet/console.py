"""The progress of runs: live bars on a terminal, one line per epoch in a log, or events for a parent process.

A run reports events, which are plain dictionaries: ``{"run", "kind": "progress" | "epoch" | "note", …}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sized
from typing import Any, Protocol, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track

from .metrics import format_metric, headline

__all__ = ["Bars", "Display", "Events", "Lines", "choose_display", "progress_bar"]

T = TypeVar("T")


class Display(Protocol):
    def __enter__(self) -> Display: ...
    def __exit__(self, *exception: object) -> None: ...
    def show(self, event: dict[str, Any]) -> None: ...


class Lines:
    """A plain log: one line per epoch and per note."""

    def __init__(self, out: TextIO | None = None):
        self.out = out or sys.stdout

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.out.flush()

    def show(self, event: dict[str, Any]) -> None:
        text = {"epoch": epoch_line, "note": lambda e: e["text"]}.get(event["kind"])
        if text:
            print(f"{event['run']}: {text(event)}", file=self.out, flush=True)


class Events(Lines):
    """One JSON object per line, for the process that started this one."""

    def show(self, event: dict[str, Any]) -> None:
        print(json.dumps(event), file=self.out, flush=True)


class Bars:
    """A live bar for each run, below one line for each epoch that has ended."""

    def __init__(self, console: Console | None = None):
        self.bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("lr {task.fields[lr]:.2g}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[memory]:.1f} GiB"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def show(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            fields = {
                "epoch": event["epoch"],
                "epochs": event["epochs"],
                "loss": format_metric("loss", event["loss"]),
                "metrics": headline(event),
                "lr": event["lr"],
                "speed": event["speed"],
                "memory": event["memory_gib"],
            }
            if event["run"] not in self.tasks:
                self.tasks[event["run"]] = self.bars.add_task(event["run"], total=event["steps"], **fields)
            self.bars.update(self.tasks[event["run"]], completed=event["step"], **fields)
        elif event["kind"] == "epoch":
            self.bars.console.print(f"[dim]{event['run']}: {epoch_line(event)}", highlight=False)
        elif event["kind"] == "note":
            self.bars.console.print(f"{event['run']}: {event['text']}", highlight=False)


def epoch_line(event: dict[str, Any]) -> str:
    parts = [f"epoch {event['epoch']}/{event['epochs']}", f"lr {event['lr']:.2g}"]
    for split in ("train", "val"):
        if (loss := f"{split}_loss") in event:
            parts.append(f"{split} loss {format_metric(loss, event[loss])}")
        if metrics := headline(event, split):
            parts.append(metrics)
    parts += [event["speed"], f"{event['memory_gib']:.1f} GiB"]
    minutes, seconds = divmod(round(event["seconds_left"]), 60)
    parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)


def choose_display() -> Display:
    """Bars on a terminal and lines elsewhere."""
    return Bars() if sys.stdout.isatty() else Lines()


def progress_bar(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Iterate over the items with a progress bar, on stderr, which disappears at the end; none outside a terminal."""
    console = Console(stderr=True)
    count = total if total is not None or not isinstance(items, Sized) else len(items)
    return track(items, description, count, console=console, transient=True, disable=not console.is_terminal)
