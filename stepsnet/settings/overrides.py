"""Recipes from text and from Python: ``key=value``, keyword arguments, and YAML such as a run's ``config.yaml``.

The modules that a recipe's ``import`` names are imported here, before the recipe is checked, since they may register
its type.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pydantic

from ..errors import UserError, nearest
from ..files.reading import parse_yaml, read_yaml
from ..files.writing import dump_yaml
from .config import RECIPE_TYPES, Recipe, key_of
from .user_modules import import_user_modules

__all__ = [
    "first_mistake",
    "known_keys",
    "override",
    "override_values",
    "parse_assignments",
    "read_recipe",
    "to_plain",
    "to_yaml",
]


def override(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """Apply ``key=value`` assignments; ``model.args.widths=[24,34,48]`` reaches inside.

    Values are JSON, a list or a mapping in YAML (``{hflip: 0.5}``), or else plain text. A mapping replaces the whole
    setting: ``augment={hflip: 0.5}`` is flips and nothing else. ``augment.hflip=0.5`` leaves the rest as it is, which
    is off if there is no augmentation yet.

    Raises:
        UserError: no ``=``, an unknown key, or a value of the wrong type or out of bounds.
    """
    return override_values(recipe, parse_assignments(assignments, "override"), merge=False)


def parse_assignments(assignments: Sequence[str], what: str) -> dict[str, Any]:
    """The values of ``key=value``: JSON, a list or a mapping in YAML, or else plain text.

    Args:
        what: what is assigned, for messages.

    Raises:
        UserError: no ``=``, or a value that is too long to be read.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"{what}: got {assignment!r}, expected key=value")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = _list_or_mapping(text)
        except (ValueError, RecursionError):  # a number of thousands of digits, brackets in brackets
            raise UserError(f"{what}: {key}: got {text[:40]}…, expected a shorter value") from None
    return values


def _list_or_mapping(text: str) -> Any:
    """The value of text that is not JSON: a list or mapping in YAML, as ``[0.9, 1e-3]``, or else the text itself."""
    if text[:1] + text[-1:] not in ("{}", "[]"):
        return text
    try:
        return parse_yaml(text, "")
    except UserError:
        return text


def override_values(recipe: Recipe, changes: Mapping[str, Any], *, merge: bool = True) -> Recipe:
    """Apply values as Python callers give them: ``{"epochs": 3, "model.args.widths": (24, 34, 48)}``.

    Here a mapping changes what it names and leaves the rest: ``{"model": {"args": {"depths": (2, 1, 1)}}}``. Settings
    of config.py, such as a ``ModelSpec`` or an ``Augment``, replace the whole.

    Args:
        merge: if False, a mapping replaces the whole too, as it does in text.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of bounds.
    """
    values, known = to_plain(recipe), known_keys(type(recipe))  # type: ignore[arg-type] # a pydantic dataclass
    keys = {field.name: key_of(type(recipe), field.name) for field in dataclasses.fields(recipe)}
    for key, value in changes.items():
        key = keys.get(key, key)
        *parents, last = key.split(".")
        inner, path = values, ""
        for part in parents:
            # the rest of what is added here has its defaults, or none; a model's own arguments may be any
            if inner.get(part) is None and (f"{path}{part}" in known or "args." in path):
                inner[part] = {}
            if not isinstance(inner.get(part), dict):
                raise UserError(_unknown(key, {*known, *_keys(values)}))
            inner, path = inner[part], f"{path}{part}."
        if last not in inner and "args." not in path and key not in known:  # args are the model's own
            raise UserError(_unknown(key, {*known, *_keys(values)}))
        inner[last] = _merged(inner.get(last), value) if merge else value
    if "epochs" in changes and "earlier_epochs" not in changes:  # they belong to the run whose config this is
        values["earlier_epochs"] = []
    return _validated(values, "override")


def _merged(old: Any, new: Any) -> Any:
    if dataclasses.is_dataclass(new) and not isinstance(new, type):
        return dataclasses.asdict(new)
    if isinstance(old, dict) and isinstance(new, Mapping):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file, such as a run's ``config.yaml``.

    Raises:
        UserError: the file cannot be read, is not YAML, or has a wrong key or value.
    """
    values = read_yaml(path, "recipe")
    if "contenders" in values:
        raise UserError(f"{path}: got a study, expected a recipe; `stepsnet sweep {path}` runs it")
    values.setdefault("task", "classification")
    if values.get("import") and isinstance(folder := values.get("import_from") or ".", str):
        values["import_from"] = str((path.parent / folder).resolve())
    return _validated(values, str(path))


def to_yaml(recipe: Recipe) -> str:
    return dump_yaml(to_plain(recipe))


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON holds it: tuples become lists."""
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return {key_of(type(recipe), name): value for name, value in plain.items()}


@lru_cache
def _reader(kind: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(kind)


def _validated(values: Mapping[str, Any], where: str) -> Recipe:
    """Raises UserError with the first key that is wrong."""
    try:
        text = json.dumps(values, default=_plain)
    except (TypeError, ValueError) as error:  # dates and sets in YAML
        raise UserError(f"{where}: {error}, expected text, numbers, lists and mappings") from None
    _import_modules_of(values)
    if (task := values["task"]) not in [*RECIPE_TYPES]:
        known = ", ".join(map(repr, RECIPE_TYPES))
        raise UserError(
            f"{where}: task: got {task!r}, expected one of {known}, or one that a module under import registers"
        )
    kind: Any = RECIPE_TYPES[task]
    try:
        return _reader(kind).validate_json(text)
    except pydantic.ValidationError as error:
        keys = {*known_keys(kind), *_keys(values)}
        raise UserError(f"{where}: {first_mistake(error, keys, _unknown)}") from None


def _plain(value: Any) -> Any:
    """The plain form of what JSON does not hold and Python callers may give: paths, and settings within a mapping."""
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"got a {type(value).__name__}")


def _import_modules_of(values: Mapping[str, Any]) -> None:
    names = values.get("import") or []
    names = [names] if isinstance(names, str) else names
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):  # otherwise pydantic reports it
        import_user_modules(names, values.get("import_from"))


_EXPECTED = {  # by pydantic's kinds of errors
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
    "missing": "one more",
    **dict.fromkeys(("list_type", "tuple_type"), "a list, such as [1, 2]"),
    **dict.fromkeys(("dict_type", "mapping_type", "dataclass_type"), "a mapping of keys to values"),
}


def first_mistake(
    error: pydantic.ValidationError, known: Collection[str], unknown: Callable[[str, Collection[str]], str]
) -> str:
    """The first key that is wrong, what it got and what was expected, in one line.

    Args:
        known: all keys, with nested ones as ``augment.mixup``.
        unknown: gives the message about a key that is not among them.
    """
    errors = error.errors()  # a misspelt key first, since the right one is then missing
    first = next((one for one in errors if one["type"] == "unexpected_keyword_argument"), errors[0])
    kind, context, got = first["type"], first.get("ctx", {}), repr(first["input"])
    parts = [str(part) for part in first["loc"]]
    if kind == "unexpected_keyword_argument":
        return unknown(".".join(parts), known)
    names = {name for key in known for name in key.split(".")}
    key = ".".join(part for part in parts if part.isdecimal() or part in names)  # without the members of a union
    if kind == "missing" and not parts[-1].isdecimal():
        return f"{key}: got none, expected one"
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else first["msg"].removeprefix("Input should be ")
    return f"{key}: got {got if len(got) < 200 else f'{got[:200]}…'}, expected {expected}"


@lru_cache
def known_keys(kind: type, prefix: str = "") -> tuple[str, ...]:
    """The keys of a type of settings and of the settings inside it, such as ``augment.mixup``."""
    found: list[str] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = key_of(kind, field.name), hints[field.name]
        found.append(prefix + name)
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                found += known_keys(typing.cast(type, inner), f"{prefix}{name}.")
    return tuple(found)


def _keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _keys(value, f"{prefix}{key}.")
    return found


def _unknown(key: str, known: Iterable[str]) -> str:
    hint = nearest(key, sorted(set(known) - {key}))
    own = "" if hint or "." in key else f", or model.args.{key} for an argument of the model"
    return (
        f"unknown key {key!r}, expected a key of the recipe{hint}{own}; `stepsnet recipes NAME` explains each of them"
    )
