"""What leaves this machine with a published run: nothing that says where its files were."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ..config import Recipe
from ..overrides import to_plain

__all__ = ["public_command", "public_recipe", "public_value"]

_LOCAL_ARGUMENTS = ("checkpoint_path", "cache_dir")  # of timm.create_model: files of this machine
_LOCAL_SETTINGS = {"import_from": None, "device": "auto", "workers": 0, "tracker": None}


def public_value(text: str) -> str:
    """The last part of a path, and nothing of a URL: ``folder:/home/me/cats@test`` -> ``folder:cats@test``.

    Paths below the current folder, such as ``data/cats``, stay as they are, and so does other text.
    """
    kind, colon, path = text.partition(":") if re.match(r"\w\w+:(?!//)", text) else ("", "", text)
    if re.match(r"\w+://", path):
        path = "URL"  # which may hold hosts and passwords
    elif re.match(r"~|[/\\]|\.\.[/\\]|[A-Za-z]:[/\\]", path):
        path = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return f"{kind}{colon}{path}"


def public_command(command: str) -> str:
    """A command with such values."""
    parts = (argument.rpartition("=") for argument in shlex.split(command))
    return shlex.join(f"{key}{equals}{public_value(value)}" for key, equals, value in parts)


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as its ``config.yaml`` holds it, for another machine; its baseline is left out."""
    values = _public(to_plain(recipe))
    model = values["model"]
    args = {key: value for key, value in model["args"].items() if key not in _LOCAL_ARGUMENTS}
    return values | {"model": {**model, "args": args}, "baseline": None} | _LOCAL_SETTINGS


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner) for inner in value]
    return public_value(value) if isinstance(value, str) else value
