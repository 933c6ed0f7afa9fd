"""Modules of a user's that a recipe names under ``import``; they register models, data sets and tasks.

To import a module is to run it. So a recipe names modules that are on this machine already: never a path, and never
something to download.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import USER_CODE, UserError

__all__ = ["import_user_modules", "is_module_version", "module_versions"]

_SUM = "sha256:"
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
# this package, and what is installed: they may lie in the folder of a user's module, as in a clone with its .venv
_NOT_THE_USERS = {Path(__file__).parent, *(Path(path) for path in map(sysconfig.get_path, _INSTALLED) if path)}

_versions: dict[str, str] = {}  # of the modules that have been imported here


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
        before = set(sys.modules)
        with _first_on_path(folders):
            try:
                module = importlib.import_module(name)
                files = _own_files(name, sys.modules.keys() - before)
                USER_CODE.update([*getattr(module, "__path__", ()), *map(str, files)])
                if name not in before:  # of one that was there, what it has loaded is not known any more
                    _versions[name] = _version_of(files)
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    where = " or ".join((*folders, "sys.path"))
                    raise UserError(f"import: found no module {name!r}, expected it in {where}") from None
                raise UserError(f"import: {name} needs {error.name}, which is not installed") from error
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too, which would end the command in silence
                raise UserError(f"import: {name} fails: {_last_line(error)}") from error


def module_versions(names: Iterable[str]) -> dict[str, str]:
    """A checksum of each of these modules, with the files beside it that it imports, as they were when this process has
    imported it for a recipe; of one that the user's code had imported before, none."""
    return {name: _versions[name] for name in names if name in _versions}


def is_module_version(text: str) -> bool:
    return text.startswith(_SUM)


def _own_files(name: str, loaded: Iterable[str]) -> list[Path]:
    """The files of a module of the user's, and of the modules and packages beside it that were loaded for it."""
    of_module = Path(str(sys.modules[name].__file__))  # a package without one has no code either
    up = name.count(".") + (of_module.name == "__init__.py")
    beside, package = of_module.parents[up], name.partition(".")[0]
    found = {of_module}
    for each in loaded:
        file = Path(getattr(sys.modules.get(each), "__file__", None) or "")
        is_own = each.partition(".")[0] == package or not any(map(file.is_relative_to, _NOT_THE_USERS))
        if file.is_relative_to(beside) and is_own:
            found.add(file)
    return sorted(found)


def _version_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):  # of a module that is no file, as in a zip
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return f"{_SUM}{digest.hexdigest()[:16]}"


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
