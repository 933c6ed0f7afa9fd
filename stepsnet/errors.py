"""What ends a command: one line that names the thing, the value and what was expected, and an exit status.

==== ============================================================
0    done
2    a mistake in what was given, such as an unknown key
3    a training that has diverged: one of its numbers is not finite
70   a fault of the program; the line says where its traceback is
74   standard output cannot be written; what goes to files is there
130  interrupted, by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP
141  the reader of standard output has gone
==== ============================================================
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from . import __version__
from .machine import is_one_of_several
from .output.terminal import OutputLost, abandon, flush, prepare_streams, printable, say

__all__ = [
    "USER_CODE",
    "Fault",
    "Stopped",
    "UserError",
    "exit_status",
    "import_extra",
    "in_a_line",
    "is_out_of_memory",
    "naming_extra",
    "nearest",
    "place_in_user_code",
]

# packages that only some of the commands need -> the extra of ours that has them
EXTRAS = {
    **dict.fromkeys(
        ("pydantic", "yaml", "rich", "filelock", "sklearn", "matplotlib", "jinja2", "torchmetrics", "shtab"), "train"
    ),
    "pycocotools": "detection",
    "transformers": "language",
    "tokenizers": "language",
    "datasets": "data",
    "pandas": "notebook",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime", "openvino"), "export"),
    **{tracker: tracker for tracker in ("tensorboard", "trackio", "wandb")},
}

# files and folders of the user's modules that a recipe names (settings/user_modules.py): a fault in them is not ours
USER_CODE: set[str] = set()

# what the machine refuses, wherever that happens, or a network disk that has gone: no fault of the program
_REFUSED = {
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "ENOSPC", "EDQUOT", "EROFS", "EIO", "EMFILE", "ENFILE", "ELOOP", "ENAMETOOLONG"),
        *("ESTALE", "ENOTCONN", "ESHUTDOWN", "ETIMEDOUT", "ENOLCK"),
    )
    if hasattr(errno, name)
}


def import_extra(package: str, key: str = "") -> Any:
    """Import a package that only some uses need. If it is missing, the UserError says how to install it.

    Args:
        key: the key of the setting that asks for it, for the message.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise UserError(f"{key}: {_not_installed(package)}" if key else _not_installed(package)) from None


@contextmanager
def naming_extra() -> Iterator[None]:
    """Make the ModuleNotFoundError for a package of an extra say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if said := _missing_extra(error):
            raise ModuleNotFoundError(said, name=error.name) from error
        raise


def _missing_extra(error: ModuleNotFoundError) -> str:
    """The message about the missing module, or nothing if it belongs to no extra."""
    return _not_installed(error.name) if error.name and _package_of(error.name) in EXTRAS else ""


def _not_installed(module: str) -> str:
    package = _package_of(module)
    return f"{package} is not installed; `pip install '.[{EXTRAS[package]}]'` in a clone of stepsnet installs it"


def _package_of(module: str) -> str:
    return module.partition(".")[0]


class UserError(Exception):
    """A mistake of the caller, as one line whatever it quotes. The command line prints it and exits with ``status``."""

    status = 2

    def __str__(self) -> str:
        return printable(super().__str__()).replace("\n", "\\n")


class Stopped(Exception):
    """Something outside ended the work in good order, such as a signal; ``status`` is the exit status."""

    status: int


class Fault(Stopped):
    """A fault of the program in another process, which has recorded it."""

    status = 70


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)", or nothing when no known name is near."""
    by_letters = {one.lower(): one for one in known}  # MHC is near mhc
    close = difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(by_letters[one] for one in close)}?)" if close else ""


def in_a_line(error: BaseException, most: int | None = None, *, with_type: bool = False) -> str:
    """An exception's message without line breaks, cut to ``most`` characters; its type too, if asked or needed."""
    text = " ".join(str(error).split())
    if most is not None and len(text) > most:
        text = f"{text[:most]}…"
    if with_type or isinstance(error, KeyError | ZeroDivisionError | AttributeError | IndexError) or not text:
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


class _Terminated(SystemExit):
    """Unlike an ``Exception``, not caught on its way by code that tries one thing after another."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block by an exception, as Ctrl-C does, so that nothing is left half-written."""

    def unwind(number: int, frame: object) -> None:
        raise _Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if ours and signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def exit_status(run: Callable[[], Any], debug: bool = False) -> int:
    """Run a function and turn what it raises into one line and an exit status; with ``debug`` let it through."""
    prepare_streams()
    status = 0
    try:
        with _unwound_by_signals():
            status = _status_of(run, debug)
        flush()
    except Exception as lost:
        if not _is_of_output(lost):
            raise
        abandon(sys.stdout)
        if status:  # the reason is known already, such as the signal of a terminal that has gone
            return status
        if isinstance(lost, OutputLost) and not lost.reader_has_gone:
            say(f"stepsnet: {lost}", error=True)
            return 74
        return 141
    return status


def _status_of(run: Callable[[], Any], debug: bool) -> int:
    try:
        run()
        return 0
    except _Terminated as ended:
        say(f"stepsnet: stopped by {ended}", error=True)
        return 128 + ended.number
    except SystemExit as ended:  # from argparse, which has said why
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        say("stepsnet: interrupted", error=True)
        return 130
    except Exception as error:
        if debug or _is_of_output(error):
            raise
        text, status = _line(error)
        say(f"stepsnet: {text}", error=True)
        return status


def _is_of_output(error: Exception) -> bool:
    """Whether standard output cannot be written. ESHUTDOWN, from a disk that has gone, is a BrokenPipeError too."""
    return isinstance(error, OutputLost | BrokenPipeError) and getattr(error, "errno", None) != errno.ESHUTDOWN


def _line(error: Exception) -> tuple[str, int]:
    """The line about an exception, and the exit status."""
    if isinstance(error, UserError | Stopped):
        return str(error), error.status
    if isinstance(error, ModuleNotFoundError) and (said := _missing_extra(error)):
        return said, 2
    if isinstance(error, OSError) and error.errno in _REFUSED:
        where = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return f"{where}{error.strerror}", 2
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return f"out of memory{f': {in_a_line(error)}' if str(error) else ''}", 2
    if _is_of_another_rank(error):
        return f"another rank has ended, and its own line says why ({in_a_line(error)})", 2
    what = in_a_line(error, 200, with_type=True)
    if "InvalidCxxCompiler" in what:
        return "compile: torch finds no C++ compiler that works, expected g++ or clang, or compile=false", 2
    if "Failed to find C compiler" in str(error):  # from Triton, for CUDA; inductor wraps it
        return "compile: torch finds no C compiler, expected gcc or clang, or compile=false", 2
    if where := place_in_user_code(error):
        return f"{where}: {what} ({_kept(error)}; --debug shows it)", 70
    return f"this is a fault of stepsnet, please report it: {what} ({_kept(error)}; --debug shows it)", 70


def place_in_user_code(error: BaseException) -> str:
    """The innermost file and line of a user's module that an exception came through, or "" if it came through none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if USER_CODE and frame.filename.startswith(tuple(USER_CODE)):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def is_out_of_memory(error: Exception) -> bool:
    """Whether one of torch's allocators failed; the CPU's and a CUDA graph's raise a plain RuntimeError."""
    torch = sys.modules.get("torch")  # not imported just for this
    if torch is None or not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in said or "error: out of memory" in said


def _is_of_another_rank(error: Exception) -> bool:
    """Whether a rank of torchrun could not reach another one; gloo raises a plain RuntimeError."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not is_one_of_several():
        return False
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    of_gloo = isinstance(error, RuntimeError) and any(words in str(error) for words in lost)
    return of_gloo or isinstance(error, torch.distributed.DistError)


def _kept(error: Exception) -> str:
    """Write the traceback into the run's folder, or else the temporary one, and say where it is."""
    command = shlex.join(["stepsnet", *sys.argv[1:]])
    text = f"stepsnet {__version__}, Python {sys.version}\n{command}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (getattr(error, "run_folder", None), None):  # None: the temporary one
        with suppress(OSError):
            number, name = tempfile.mkstemp(".txt", "fault-" if folder else "stepsnet-fault-", folder)
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return f"the full traceback is in {name}"
    return "its traceback could not be written anywhere"
