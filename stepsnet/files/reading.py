"""Reading JSON, YAML and text from outside: whatever makes a file unreadable is reported in a line with its name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import UserError, in_a_line

__all__ = [
    "add_yaml_schema",
    "hash_text",
    "parse_json",
    "parse_yaml",
    "read_json",
    "read_text",
    "read_yaml",
    "require_data_folder",
    "yaml_file",
]

_MOST_NODES = 100_000  # in a YAML file, with what its aliases stand for: a few lines can stand for billions
_MOST_DEPTH = 100


def _seen_from(path: str | Path) -> str:
    """For messages about missing files: the folder from which a relative path was looked up, or nothing."""
    return "" if Path(path).is_absolute() else f" (looked up from {os.path.abspath('.')})"


def require_data_folder(path: str | Path, expected: str) -> None:
    """Raises UserError, with what was expected, if the folder of the data does not exist."""
    if not Path(path).is_dir():
        raise UserError(f"data: {path} is not a folder{_seen_from(path)}, expected {expected}")


def read_text(path: Path, what: str) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Args:
        what: what the file is, for messages, such as "recipe".

    Raises:
        UserError: it is missing, not a regular file, unreadable, not UTF-8, or has a zero byte.
    """
    with _opened(path, what) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{what}: cannot read {path}: it is not UTF-8 (line {line})") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{what}: cannot read {path}: it has a zero byte (line {line}), expected text")
    return text


def hash_text(path: Path, what: str) -> str:
    """The SHA-256 of a file, whose content is not kept. Raises UserError if it is not a readable, regular file."""
    with _opened(path, what) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _opened(path: Path, what: str) -> Iterator[BufferedReader]:
    """A regular file. Raises UserError if it cannot be opened, or read in the block."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise UserError(f"{what}: cannot read {path}: it is not a file")
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        from_here = _seen_from(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{what}: cannot read {path}: {getattr(error, 'strerror', None) or error}{from_here}") from None


def read_json(path: Path, what: str, kind: type | None = None, *, allow_nan: bool = False) -> Any:
    """The content of a JSON file.

    Args:
        kind: dict or list, if it has to be one.
        allow_nan: leave ``NaN`` and ``Infinity`` to the caller, who can name the record that has them.

    Raises:
        UserError: as for :func:`read_text`, and if the file is not JSON or not of that kind.
    """
    return _of_kind(
        parse_json(read_text(path, what), f"{what}: cannot read {path}", allow_nan=allow_nan),
        kind,
        f"{what}: got",
        f" in {path}",
    )


def parse_json(text: str, where: str, *, allow_nan: bool = False) -> Any:
    """Parse JSON, by default without ``NaN`` and ``Infinity``. Raises UserError, which begins with ``where``."""
    try:
        return json.loads(text, parse_constant=None if allow_nan else _no_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where}: it is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python converts, or NaN
        raise UserError(f"{where}: {str(error).partition(';')[0]}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON, expected a number or null")


def yaml_file(given: str | Path) -> Path | None:
    """The file that a recipe or a study is given as; None if it is given by its name."""
    return Path(given) if isinstance(given, Path) or given.endswith((".yaml", ".yml")) else None


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: as for :func:`read_text`, and if the file is not YAML or not a mapping.
    """
    content = parse_yaml(read_text(path, what), f"{what}: cannot read {path}")
    return _of_kind(content, dict, f"{what}: got", f" in {path}")


def parse_yaml(text: str, where: str) -> Any:
    """Parse plain data in YAML, as YAML 1.2 reads it: 1e-3 is a number; 1:30, ``no`` and 2026-01-01 are text.

    Raises:
        UserError: the text is not YAML, has a key twice or one that is not text, tags, aliases that contain themselves,
            or more than 100,000 values with what aliases stand for. The message begins with ``where``.
    """
    import yaml

    try:
        content = yaml.load(text, _loader())
        _check_size(content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{where}: {error.problem or error.context}{at}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise UserError(f"{where}: {in_a_line(error)}") from None
    except RecursionError:
        raise UserError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where}: {str(error).partition(';')[0]}") from None
    return content


def _of_kind(content: Any, kind: type | None, got: str, behind: str) -> Any:
    if kind is None or isinstance(content, kind):
        return content
    names: dict[type, str] = {dict: "a mapping of keys to values", list: "a list"}
    raise UserError(f"{got} {type(content).__name__}{behind}, expected {names[kind]}")


def _check_size(content: Any) -> None:
    """Raises ValueError for aliases that contain themselves, too many values, and too many levels."""
    sizes: dict[int, int] = {}  # by id, so that what aliases share is measured once

    def size(value: Any, above: tuple[int, ...]) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) in above:
            raise ValueError("an alias refers to something that contains it")
        if len(above) > _MOST_DEPTH:
            raise ValueError(f"it has more than {_MOST_DEPTH} levels")
        if id(value) not in sizes:
            parts = value.values() if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size(part, (*above, id(value))) for part in parts)
        if sizes[id(value)] > _MOST_NODES:
            raise ValueError(f"it stands for more than {_MOST_NODES:,} values")
        return sizes[id(value)]

    size(content, ())


# The core schema of YAML 1.2 (10.3.2). PyYAML's own is that of YAML 1.1.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
}


def add_yaml_schema(kind: Any, resolvers: dict[str, Any]) -> None:
    kind.yaml_implicit_resolvers = resolvers
    for name, (pattern, first) in _SCALARS.items():
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), first)


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            self.flatten_mapping(node)
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key is not text", key.start_mark)
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: Any) -> None:  # no merge keys, which YAML 1.2 does not have
            pass

    add_yaml_schema(Loader, {})
    plain = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "str", "seq", "map")} | {None}  # None: refused
    Loader.yaml_constructors = {tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in plain}
    numbers: dict[str, Callable[[Any, Any], Any]] = {
        "int": lambda loader, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10),
        "float": lambda loader, node: float(node.value.replace(".inf", "inf").replace(".nan", "nan")),
    }
    for name, construct in numbers.items():
        Loader.add_constructor(f"tag:yaml.org,2002:{name}", construct)
    return Loader
