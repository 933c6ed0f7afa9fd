"""What the program says on its two streams: without control characters, in any encoding, to any reader.

Names of files, classes and runs come from elsewhere. Written as they are, they could move a terminal's cursor, change
its title, or end a run in an encoding that lacks one of their characters.
"""

from __future__ import annotations

import codecs
import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

__all__ = ["OutputLost", "abandon", "counted", "flush", "prepare_streams", "printable", "say", "silenced"]

# what stands for our own characters in an encoding that lacks them
_PLAIN = {"—": "-", "–": "-", "−": "-", "×": "x", "±": "+-", "→": "->", "…": "...", "·": "*", "⁹": "^9", "√": "sqrt "}

# C0 without tab and newline, DEL and C1, and what ends a line or reverses the direction of text
_CONTROL = {*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROL}


class OutputLost(Exception):
    """Standard output cannot be written: its reader has gone, or its disk is full."""

    def __init__(self, error: OSError | ValueError):
        number = getattr(error, "errno", None)
        super().__init__(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}")
        self.reader_has_gone = number == errno.EPIPE


@contextmanager
def silenced(logger: str) -> Iterator[None]:
    """Silence the log of a library that says what we say ourselves, or what does not matter."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def printable(text: object) -> str:
    """The text with control characters as they are written in Python, such as ``\\x1b``; newlines and tabs stay."""
    return str(text).translate(_ESCAPED)


def counted(number: int, noun: str) -> str:
    """``1 epoch``, ``1,437 images``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(text: object = "", *, error: bool = False, end: str = "\n", flush: bool = False) -> None:
    """Print a text on standard output, or on standard error, where what cannot be written is dropped.

    Raises:
        OutputLost: standard output cannot be written.
    """
    try:
        print(printable(text), end=end, flush=flush or error, file=sys.stderr if error else sys.stdout)
    except (OSError, ValueError) as lost:  # a ValueError: the stream is closed
        if not error:
            raise OutputLost(lost) from None


def flush() -> None:
    """Flush standard output. Raises OutputLost if what has been said cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as lost:
        raise OutputLost(lost) from None


def prepare_streams() -> None:
    """Make sure that no character ends the program, and that no file takes the place of a closed stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: a file opened next would get its descriptor
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the program runs
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # a stand-in for a stream, in a notebook say
            stream.reconfigure(errors="stepsnet")  # type: ignore[union-attr]


def abandon(stream: TextIO) -> None:
    """Discard what a stream still holds; at exit, Python would try once more to write it, and complain."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    plain = [_PLAIN.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in text]
    return "".join(plain), error.end


codecs.register_error("stepsnet", _replaced)
