"""What a run shows: lines often enough to tell it from one that hangs, whatever its name holds."""

import errno
import io
import time

import pytest
from rich.console import Console

from stepsnet.output import console
from stepsnet.output.console import Bars, Display, Lines, choose_display, progress_bar, working

NAME = "a[/b]:smile:\x1b[31m"
PROGRESS = {
    "run": NAME,
    "kind": "progress",
    "epoch": 1,
    "epochs": 2,
    "step": 3,
    "steps": 10,
    "loss": 2.25,
    "top1": 12.5,
    "lr": 1e-3,
    "speed": "9 images/s",
    "memory_gib": 0.5,
    "seconds_left": 61.0,
}
EPOCH = {**PROGRESS, "kind": "epoch", "train_loss": 2.0, "val_loss": 1.5, "val_top1": 50.0}


def shown_by(lines, wanted, out):
    """Wait for a line, for ten seconds at most: a thread writes it."""
    for _ in range(1000):
        if wanted in out.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(out.getvalue())


def test_a_log_is_never_silent_for_long():
    out = io.StringIO()
    with Lines(out, silence=0.04) as lines:
        shown_by(lines, "starting (for 0 s)", out)
        lines.show({"run": "one, two", "kind": "note", "text": "of both of them"})
        shown_by(lines, "one, two: of both of them\nstarting (for 0 s)", out)
        lines.show({**PROGRESS, "run": "two"})
        shown_by(lines, "two: epoch 1/2, update 3/10, loss 2.250, top-1 accuracy 12.5%, 9 images/s, 1:01 left", out)
        lines.show({"run": "two", "kind": "phase", "text": "epoch 1/2: evaluating"})
        shown_by(lines, "two: epoch 1/2: evaluating (for 0 s)", out)
        lines.show({**EPOCH, "run": "one", "epoch": 2})
        lines.show({"run": "two", "kind": "end"})  # it has failed
        shown_by(lines, "starting or ending a run (for 0 s)", out)
        assert "one: epoch 2/2, lr 0.001, train loss 2.000, val loss 1.500, top-1 accuracy 50.0%" in out.getvalue()
    written = len(out.getvalue())
    time.sleep(0.1)
    assert len(out.getvalue()) == written


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_run_goes_on_where_its_log_cannot_be_written():
    with Lines(Full(), silence=0.04) as lines:
        for event in (PROGRESS, EPOCH):
            lines.show(event)
        time.sleep(0.1)


class Closed(io.StringIO):
    """A terminal from when it is closed on."""

    gone = False

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_run_goes_on_where_its_terminal_is_closed(monkeypatch):
    """And what ends it, such as SIGHUP, is not hidden by the bars that cannot be taken away."""
    for events in ([], [EPOCH, {**PROGRESS, "run": "other"}, {"run": NAME, "kind": "note", "text": "a"}]):
        terminal = Closed()
        settings = {"file": terminal, "force_terminal": True, "width": 200}
        monkeypatch.setattr(console, "Console", lambda settings=settings, **others: Console(**settings))
        with pytest.raises(KeyError), choose_display() as bars:
            assert type(bars) is Bars
            bars.show(PROGRESS)
            assert NAME[:6] in terminal.getvalue()
            terminal.gone = True
            for event in events:
                bars.show(event)
            raise KeyError


def test_names_are_neither_markup_nor_control():
    out = io.StringIO()
    with Lines(out) as lines:
        lines.show(EPOCH)
    terminal = io.StringIO()
    with Bars(Console(file=terminal, force_terminal=True, width=200, legacy_windows=False)) as bars:
        for event in (PROGRESS, {**EPOCH, "text": NAME}, {"run": NAME, "kind": "note", "text": NAME}):
            bars.show(event)
    for said in (out.getvalue(), terminal.getvalue()):
        assert "a[/b]:smile:\\x1b[31m" in said and "\x1b[31m" not in said


def test_the_display_fits_where_it_is_shown(monkeypatch):
    for settings, kind in (
        ({"force_terminal": True, "width": 100}, Bars),
        ({"force_terminal": True, "width": 20}, Lines),
        ({"force_terminal": True, "width": 100, "force_interactive": False}, Lines),  # TERM=dumb
        ({"force_terminal": False}, Lines),
    ):
        monkeypatch.setattr(console, "Console", lambda settings=settings, **others: Console(**settings))
        assert type(choose_display()) is kind
    monkeypatch.setenv("RANK", "16")  # a variable of the user's own
    assert type(choose_display()) is kind
    monkeypatch.setenv("WORLD_SIZE", "32")
    with choose_display() as display:
        assert type(display) is Display
        display.show(PROGRESS)


def test_long_work_outside_a_terminal_has_lines(monkeypatch, capsys):
    monkeypatch.setattr(console, "_MOST_SECONDS_OF_SILENCE", 0.04)
    for items, description in ((["a", "b"], "checking val"), (iter("ab"), "tokens")):
        seen = []
        for item in progress_bar(items, description):
            seen.append(item)
            time.sleep(0.3)  # one that takes long: it is said within it
        assert seen == ["a", "b"]
    said = capsys.readouterr().err
    for text in ("checking val: 0 of 2", "checking val: 1 of 2", "tokens: 0", "tokens: 1"):
        assert f"stepsnet: {text} (for " in said
    monkeypatch.setattr(console, "_MOST_SECONDS_OF_SILENCE", 0.04)
    with working(f"scoring {NAME}"):
        time.sleep(0.3)
    assert "stepsnet: scoring a[/b]:smile:\\x1b[31m (for 0 s)\n" in capsys.readouterr().err
    with pytest.raises(KeyError), working("scoring"):
        raise KeyError
