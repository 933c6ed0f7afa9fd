"""Modules of a user's that a recipe names under ``import``; they register models, data sets and tasks.

To import a module is to run it. So a recipe names modules that are on this machine already: never a path, and never
something to download.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import USER_CODE, UserError

__all__ = ["import_user_modules"]


def import_user_modules(names: Sequence[str], folder: str | Path | None = None) -> None:
    """Import modules by name, each once in a process.

    They are looked up in the current folder, then in ``folder``, then on ``sys.path``. Both folders stay at the end
    of ``sys.path``, for what the modules import later.

    Args:
        folder: that of the recipe's file.

    Raises:
        UserError: a name is not that of a module, the module is not found, or it fails.
    """
    folders = list(dict.fromkeys(str(Path(each).resolve()) for each in (".", folder) if each is not None))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"import: got {name!r}, expected the name of a module, such as my_models")
        with _first_on_path(folders):
            try:
                module = importlib.import_module(name)
                USER_CODE.update(getattr(module, "__path__", None) or [str(module.__file__)])
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    where = " or ".join((*folders, "sys.path"))
                    raise UserError(f"import: found no module {name!r}, expected it in {where}") from None
                raise UserError(f"import: {name} needs {error.name}, which is not installed") from error
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too, which would end the command in silence
                raise UserError(f"import: {name} fails: {_last_line(error)}") from error


@contextmanager
def _first_on_path(folders: Sequence[str]) -> Iterator[None]:
    before = list(sys.path)
    importlib.invalidate_caches()  # a module may have been written a moment ago
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = [*before, *(folder for folder in folders if folder not in before)]


def _last_line(error: BaseException) -> str:
    """What went wrong and where, in a line; --debug shows the traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    try:
        said = " ".join(str(error).split())
    except Exception:  # of the user's own class
        said = "(it cannot be printed)"
    return f"{type(error).__name__}: {said} ({where})"
