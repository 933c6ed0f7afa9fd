"""The progress of runs: live bars on a terminal, lines in a log, or events for a parent process.

A run reports events, which are plain dictionaries with a "run" and a "kind": progress, phase, epoch or note. If it
fails, whoever started it adds an event of the kind "end".
Outside a terminal, something is printed at least every ten seconds, so that a log tells a slow run from one that hangs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any, Self, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track
from rich.text import Text

from ..machine import is_main_process
from ..metrics import format_metric, headline
from .terminal import OutputLost, printable, say

__all__ = ["Bars", "Display", "Events", "Lines", "NotebookBars", "choose_display", "progress_bar", "working"]

T = TypeVar("T")
_MOST_SECONDS_OF_SILENCE = 10.0
_NARROWEST_FOR_BARS = 60  # columns of a terminal


class _Lasting:
    """A stream that may go away, such as that of a closed terminal: what cannot be written is dropped without an error.

    rich lets such errors through, even while it removes the bars because of another exception.
    """

    def __init__(self, out: Any):
        self.given = out

    @property
    def out(self) -> Any:
        """The stream; a standard one is looked up each time, since it may be redirected meanwhile."""
        return getattr(sys, self.given) if isinstance(self.given, str) else self.given

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self.out.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    name = "stderr" if stderr else "stdout"
    console.file = cast("TextIO", _Lasting(name if console.file is getattr(sys, name) else console.file))
    return console


class Display:
    """Where the events of runs are shown. This base class shows none, for processes beside the one that does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def show(self, event: dict[str, Any]) -> None:
        return None

    def note(self, run: str, text: str) -> None:
        self.show({"run": run, "kind": "note", "text": text})


class Lines(Display):
    """A log: a line for each epoch and note and, if these are rare, lines that say where each run is.

    A run does not end because its log cannot be written: it goes on without it.
    """

    def __init__(self, out: TextIO | None = None, silence: float | None = None):
        self.out, self.silence = out, _MOST_SECONDS_OF_SILENCE if silence is None else silence
        # for each run that is going on: what it does, the format of the time since then, and since when
        self.where: dict[str, tuple[str, str, float]] = {}
        self.written_at = time.monotonic()
        self.elsewhere = ("starting", self.written_at)  # what is being done while no run is going on
        self.writing, self.ended = threading.RLock(), threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()

    def show(self, event: dict[str, Any]) -> None:
        kind, run, now = event["kind"], event["run"], time.monotonic()
        with self.writing:
            if kind == "progress":
                self.where[run] = (_progress_line(event), "{:.0f} s ago", now)
            elif kind == "phase":
                self.where[run] = (event["text"], "for {:.0f} s", now)
            elif kind == "note":
                self.write(f"{run}: {event['text']}")
            elif kind == "epoch":
                self.write(f"{run}: {epoch_line(event)}")
            if kind == "end" or (kind == "epoch" and event["epoch"] == event["epochs"]):
                self.where.pop(run, None)
                self.elsewhere = ("starting or ending a run", now)

    def write(self, line: str) -> None:
        self.written_at = time.monotonic()
        with suppress(OutputLost, OSError, ValueError):
            if self.out is None:
                say(line, flush=True)
            else:
                print(printable(line), file=self.out, flush=True)

    def _break_silence(self) -> None:
        often = min(self.silence / 4, 1.0)
        while not self.ended.wait(often):
            with self.writing:
                if time.monotonic() - self.written_at >= self.silence - often and not self.ended.is_set():
                    self._say_where()

    def _say_where(self) -> None:
        now = time.monotonic()
        for run, (what, how_long, since) in self.where.items():
            waiting = f" ({how_long.format(now - since)})" if now - since >= self.silence / 2 else ""
            self.write(f"{run}: {what}{waiting}")
        if not self.where:
            what, since = self.elsewhere
            self.write(f"{what} (for {now - since:.0f} s)")


class Events(Display):
    """One JSON object per line, for the process that started this one.

    If that process is gone, events are dropped: a run must not end without its checkpoint because of them.
    """

    def show(self, event: dict[str, Any]) -> None:
        with suppress(OutputLost, BrokenPipeError):
            say(json.dumps(event), flush=True)


class Bars(Display):
    """A live bar for each run, below one line for each epoch that has ended."""

    def __init__(self, console: Console | None = None):
        self.bars = Progress(
            _column("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            _column("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            _column("loss {task.fields[loss]}"),
            _column("{task.fields[metrics]}"),
            _column("lr {task.fields[lr]:.2g}"),
            _column("{task.fields[speed]}"),
            _column("{task.fields[memory]:.1f} GiB"),
            TimeRemainingColumn(compact=True),
            _column("left"),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
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
                name = printable(event["run"])
                self.tasks[event["run"]] = self.bars.add_task(name, total=event["steps"], **fields)
            self.bars.update(self.tasks[event["run"]], completed=event["step"], **fields)
        elif event["kind"] == "epoch":
            self.write(f"{event['run']}: {epoch_line(event)}", style="dim")
        elif event["kind"] == "note":
            self.write(f"{event['run']}: {event['text']}")

    def write(self, line: str, style: str = "") -> None:
        self.bars.console.print(Text(printable(line), style))  # in a Text, rich looks for neither markup nor emoji


def _column(text: str, **settings: Any) -> TextColumn:
    return TextColumn(text, markup=False, **settings)


class NotebookBars(Bars):
    """The same bars in a notebook: one output that is redrawn, and a line for each epoch below it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, event: dict[str, Any]) -> None:
        super().show(event)
        if event["kind"] != "progress":
            return
        table = self.bars.make_tasks_table(self.bars.tasks)
        if self.shown is None:
            self.shown = import_module("IPython.display").display(table, display_id=True)
        else:
            self.shown.update(table)

    def write(self, line: str, style: str = "") -> None:
        say(line, flush=True)


def epoch_line(event: dict[str, Any]) -> str:
    parts = [f"epoch {event['epoch']}/{event['epochs']}", f"lr {event['lr']:.2g}"]
    for split in ("train", "val"):
        if (loss := f"{split}_loss") in event:
            parts.append(f"{split} loss {format_metric(loss, event[loss])}")
        if metrics := headline(event, split):
            parts.append(metrics)
    return ", ".join([*parts, event["speed"], f"{event['memory_gib']:.1f} GiB", _time_left(event)])


def _progress_line(event: dict[str, Any]) -> str:
    parts = [f"epoch {event['epoch']}/{event['epochs']}", f"update {event['step']}/{event['steps']}"]
    parts += [f"loss {format_metric('loss', event['loss'])}", headline(event), event["speed"], _time_left(event)]
    return ", ".join(filter(None, parts))


def _time_left(event: dict[str, Any]) -> str:
    minutes, seconds = divmod(round(event["seconds_left"]), 60)
    return f"{minutes}:{seconds:02d} left"


def choose_display() -> Display:
    """Bars in a notebook and on a terminal that can draw them, and lines elsewhere.

    Of torchrun's processes, only the first shows anything.
    """
    if not is_main_process():
        return Display()
    console = _console()
    if console.is_jupyter:
        return NotebookBars()
    return Bars(console) if console.is_interactive and console.width >= _NARROWEST_FOR_BARS else Lines()


@cache
def _stderr() -> Console:
    """One console for all callers, since rich stacks the live displays of one console."""
    return _console(stderr=True)


def progress_bar(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Iterate over the items, with a bar on stderr that disappears at the end, or with lines outside a terminal."""
    console = _stderr()
    count = total if total is not None or not isinstance(items, Sized) else len(items)
    if console.is_interactive:
        return track(items, description, count, console=console, transient=True)
    return _with_lines(items, description, count)


def _with_lines(items: Iterable[T], description: str, count: int | None) -> Iterator[T]:
    of = f" of {count:,}" if count else ""
    with Lines(sys.stderr) as lines:
        lines.show({"run": "stepsnet", "kind": "phase", "text": f"{description}: 0{of}"})
        for number, item in enumerate(items, 1):
            yield item
            lines.show({"run": "stepsnet", "kind": "phase", "text": f"{description}: {number:,}{of}"})


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr that the block is running: the time on a terminal, and elsewhere a line every ten seconds."""
    console = _stderr()
    if console.is_interactive:
        columns = (SpinnerColumn(), _column("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            bars.add_task(printable(what), total=None)
            yield
        return
    with Lines(sys.stderr) as lines:
        lines.show({"run": "stepsnet", "kind": "phase", "text": what})
        yield
