"""User modules that a recipe names under ``import``; they register models, data sets and tasks.

To import a module is to run it. So a recipe can only name modules that are already on this machine, and nothing is
downloaded for it. Among them are those beside the recipe's file and in the folder that its ``import_from`` names:
whoever loads a run that somebody else has made also runs the modules that came with it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder, all_suffixes
from importlib.util import resolve_name
from pathlib import Path

from ..errors import USER_CODE, UserError

__all__ = ["import_user_modules", "is_module_version", "module_versions"]

_SUM = "sha256:"
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
# this package, and what is installed: they may lie in the folder of a user's module, as in a clone with its .venv
_PACKAGE = Path(__file__).parent.parent
_NOT_THE_USERS = {_PACKAGE, *(Path(path) for path in map(sysconfig.get_path, _INSTALLED) if path)}

# functions by which a package may import modules that no statement names
_BY_NAME = {"import_module", "__import__", "iter_modules", "walk_packages"}

_loaded: set[str] = set()  # modules that were first imported here, and what they imported
_versions: dict[str, str] = {}  # by name, for those of them that a recipe named


def import_user_modules(names: Sequence[str], folder: str | Path | None = None) -> None:
    """Import modules by name, each once in a process.

    They are looked up in the current folder, then in ``folder``, then on ``sys.path``. Both folders stay at the end
    of ``sys.path``, for what the modules import later.

    Args:
        folder: the folder of the recipe's file.

    Raises:
        UserError: a name is not that of a module, the module is not found or fails, or another one of that name has
            been imported already.
    """
    folders = list(dict.fromkeys(str(Path(each).resolve()) for each in (".", folder) if each is not None))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"import: got {name!r}, expected the name of a module, such as my_models")
        before = set(sys.modules)
        with _first_on_path(folders):
            try:
                module = importlib.import_module(name)
                loaded = sys.modules.keys() - before
                files = _own_files(name, loaded)
                USER_CODE.update([*getattr(module, "__path__", ()), *map(str, files)])
                _loaded.update(loaded)
                # a module that the user's code had imported before is as it was then
                if name in loaded or (name in _loaded and name not in _versions):
                    _versions[name] = _version_of(_files_in_statements(name))
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    where = " or ".join((*folders, "sys.path"))
                    raise UserError(f"import: found no module {name!r}, expected it in {where}") from None
                raise UserError(f"import: {name} needs {error.name}, which is not installed") from error
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too, which would end the command in silence
                raise UserError(f"import: {name} fails: {_last_line(error)}") from error
            _require_found_now(name)


def module_versions(names: Iterable[str]) -> dict[str, str]:
    """The checksums of these modules, each as it was when this process imported it for a recipe.

    A checksum covers the module and the files beside it that its import statements, and theirs, name. A module that the
    user's code had imported before has none.
    """
    return {name: _versions[name] for name in names if name in _versions}


def is_module_version(text: str) -> bool:
    return text.startswith(_SUM)


def _require_found_now(name: str) -> None:
    """Raises UserError if this process has already imported another module than the one found by this name now."""
    path: Sequence[str] | None = None
    here, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:  # such as one that a notebook has made
            return
        path, here = spec.submodule_search_locations or (), spec.origin
    there = getattr(sys.modules[name], "__file__", None)
    if not there or not here or os.path.realpath(there) == os.path.realpath(here):
        return
    of_there = _versions.get(name) or _version_of(_files_in_statements(name, Path(there)))
    if of_there != _version_of(_files_in_statements(name, Path(here))):
        raise UserError(
            f"import: got {name} of {there}, which this process has imported before, expected that of {here}: use a "
            "process for each of them, or rename one of them"
        )


def _own_files(name: str, loaded: Iterable[str]) -> list[Path]:
    """The files of a user's module, and of the modules and packages beside it that were loaded for it."""
    of_module, beside = _places(name)
    found = {of_module}
    for each in loaded:
        file = Path(getattr(sys.modules.get(each), "__file__", None) or "")
        if file.is_relative_to(beside) and _is_own(file, each, name):
            found.add(file)
    return sorted(found)


def _files_in_statements(name: str, of_module: Path | None = None) -> list[Path]:
    """The files of a user's module, and of what is beside it that its import statements, and theirs, name.

    They do not depend on what else this process has loaded.

    Args:
        of_module: the module's file; by default the one that was imported.
    """
    of_module, beside = _places(name, of_module)
    found, seen, waiting = {of_module}, set(), [name]
    while waiting:
        parts = waiting.pop().split(".")
        for each in (".".join(parts[:depth]) for depth in range(1, len(parts) + 1)):  # a package runs first
            place = beside.joinpath(*each.split("."))
            files = (Path(f"{stem}{suffix}") for stem in (place / "__init__", place) for suffix in all_suffixes())
            file = next(filter(Path.is_file, files), None)
            if file is not None and each not in seen and _is_own(file, each, name):
                seen.add(each)
                found.add(file)
                waiting += _imported_by(file, each, is_package=file.parent == place)
    return sorted(found)


def _imported_by(file: Path, name: str, is_package: bool) -> Iterator[str]:
    """The modules that the statements in a module's file import, and names in them that may be modules.

    For a package that imports by names that it computes, these include all modules in its folder.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # an extension, or a file in a zip
        return
    for node in _run_on_import(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # from beyond the outermost package
                source = "." * node.level + (node.module or "")
                source = resolve_name(source, name if is_package else name.rpartition(".")[0])
                yield from (f"{source}.{alias.name}" for alias in node.names)
    if is_package and any(_last_name(node) in _BY_NAME for node in ast.walk(tree)):
        yield from (f"{name}.{path.stem}" for path in file.parent.iterdir() if path.stem.isidentifier())


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module that are neither in a function nor only for type checkers."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield child
            if isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
                child = ast.Module(child.orelse, [])
            yield from _run_on_import(child)


def _last_name(node: ast.AST) -> str:
    """The name c in the expressions c and a.b.c; "" for anything else."""
    return getattr(node, "id", getattr(node, "attr", ""))


def _places(name: str, of_module: Path | None = None) -> tuple[Path, Path]:
    """The file of a module, by default the imported one, and the folder that holds it or its outermost package."""
    of_module = of_module or Path(str(sys.modules[name].__file__))  # a package without one has no code either
    return of_module, of_module.parents[name.count(".") + (of_module.name == "__init__.py")]


def _is_own(file: Path, module: str, name: str) -> bool:
    """Whether a module belongs to the package of the module ``name``, or else is neither installed nor ours."""
    is_of_package = module.partition(".")[0] == name.partition(".")[0]
    return is_of_package or not any(map(file.is_relative_to, _NOT_THE_USERS))


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
