"""`stepsnet recipes`: what can be trained, and what each key of a recipe means."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..terminal import say

if TYPE_CHECKING:
    from ..config import Recipe

HELP = "list the recipes, or print one with the meaning of each key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patterns", metavar="NAME", nargs="*", help="one recipe, or patterns such as 'cifar10/*'")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..recipes import RECIPES, matching

    found = matching(options.patterns) if options.patterns else list(RECIPES.values())
    if len(options.patterns) == 1 and options.patterns[0] in RECIPES and not options.json:
        say(explain(found[0]))
    elif options.json:
        say(json.dumps({recipe.name: recipe.title for recipe in found}))
    else:
        _print_list(found)


def _print_list(found: Sequence[Recipe]) -> None:
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        printed = ", ".join(f"{name.removeprefix('val_')} {value:g}" for name, value in recipe.expected.items())
        say(f"{recipe.name:<{width}} {recipe.title}{f'; the paper prints {printed}' if printed else ''}")


def explain(recipe: Recipe) -> str:
    """The recipe as YAML, with each key's type, bounds, default and meaning as a comment."""
    import pydantic
    import yaml

    from ..overrides import to_plain

    fields = pydantic.TypeAdapter(type(recipe)).json_schema()["properties"]
    lines = [f"# {recipe.title}"]
    for key, value in to_plain(recipe).items():
        field = fields[key]
        default = f"; default {json.dumps(field['default'])}" if "default" in field else ""
        lines.append(f"# {field.get('description', 'the kind of recipe')}: {_type_of(field)}{default}")
        lines.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=116).rstrip())
    return "\n".join(lines)


_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON schema as a user reads it: ``whole number, at least 1``."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        parts = schema.get("prefixItems")
        return f"list of {len(parts)} times {_type_of(parts[0])}" if parts else f"list of {_type_of(schema['items'])}"
    bounds = [f"{text} {schema[key]:g}" for key, text in _BOUNDS.items() if key in schema]
    return ", ".join(
        [_TYPES.get(schema.get("type", ""), "null" if schema.get("type") == "null" else "mapping"), *bounds]
    )
