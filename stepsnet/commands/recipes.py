"""`stepsnet recipes`: what can be trained, and what each key of a recipe means."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

from ..files.reading import parse_yaml, yaml_file
from ..files.writing import dump_json, dump_yaml
from ..output.terminal import say
from .options import add_json_option

if TYPE_CHECKING:
    from ..settings.config import Recipe

__all__ = ["explain"]

HELP = "list the recipes, or print one with the meaning of each key"

Schema = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "patterns",
        metavar="NAME",
        nargs="*",
        help="a recipe or a .yaml file to explain, a study to print, or patterns to list, such as 'cifar10/*'",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    from ..recipes import RECIPES, matching
    from ..settings.overrides import read_recipe

    if len(options.patterns) == 1 and (declaration := _study(options.patterns[0])):
        say(dump_json(parse_yaml(declaration, "study")) if options.json else declaration)
        return
    if len(options.patterns) == 1 and (file := yaml_file(options.patterns[0])):
        found, is_one = [read_recipe(file)], True
    else:
        found = matching(options.patterns) if options.patterns else list(RECIPES.values())
        is_one = options.patterns == [found[0].name]
    if options.json:
        say(dump_json({recipe.name: recipe.title for recipe in found}))
    elif is_one:
        say(explain(found[0]))
    else:
        _say_list(found)


def _study(name: str) -> str | None:
    """The declaration of a study that comes with the package; None if there is none of this name."""
    from ..study.declare import studies

    file = studies().get(name)
    return None if file is None else file.read_text(encoding="utf-8").rstrip()


def _say_list(found: Sequence[Recipe]) -> None:
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        printed = ", ".join(f"{name.removeprefix('val_')} {value:g}" for name, value in recipe.expected.items())
        say(f"{recipe.name:<{width}} {recipe.title}{f'; the paper prints {printed}' if printed else ''}")


def explain(recipe: Recipe) -> str:
    """The recipe as YAML, with each key's meaning, type, bounds and default as a comment."""
    import pydantic

    from ..settings.overrides import to_plain

    schema = pydantic.TypeAdapter(type(recipe)).json_schema()
    return "\n".join([f"# {recipe.title or recipe.name}", *_lines(to_plain(recipe), schema, schema["$defs"])])


def _lines(values: Mapping[str, Any], schema: Schema, defined: Schema) -> Iterator[str]:
    for key, value in values.items():
        field = schema["properties"][key]
        inside = _settings_inside(field, defined)
        yield f"# {_meaning(field)}"
        if inside and value is not None:
            yield f"{key}:"
            yield from (indent(line, "  ") for line in _lines(value, inside, defined))
            continue
        if inside:
            yield "# a mapping of these keys, each with the default that it has if it is left out:"
            yield from (f"#   {name}: {_meaning(of_name)}" for name, of_name in inside["properties"].items())
        yield dump_yaml({key: value}, lists_in_line=True).rstrip()


def _settings_inside(field: Schema, defined: Schema) -> Schema | None:
    """The schema of the settings that a field holds, such as an augmentation's."""
    names = [one["$ref"].rpartition("/")[2] for one in (field, *field.get("anyOf", ())) if "$ref" in one]
    return defined[names[0]] if names else None


def _meaning(field: Schema) -> str:
    default = f"; default {json.dumps(field['default'])}" if "default" in field else ""
    return f"{field.get('description', 'the kind of recipe')} ({_type_of(field)}{default})"


_UNTOLD = 1e6  # larger bounds only catch mistakes, and are not shown
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def _type_of(schema: Schema) -> str:
    """A JSON schema in words, such as ``whole number, at least 1``."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        parts = schema.get("prefixItems")
        return f"list{f' of {len(parts)}' if parts else ''}, each a {_type_of(parts[0] if parts else schema['items'])}"
    bounds = [f"{text} {schema[key]:g}" for key, text in _BOUNDS.items() if schema.get(key, _UNTOLD) < _UNTOLD]
    return ", ".join([_TYPES.get(schema.get("type", ""), "mapping"), *bounds])
