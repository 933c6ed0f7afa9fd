"""What leaves this machine with a published run: nothing that says where its files were."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

from ..config import Recipe
from ..overrides import to_plain

__all__ = ["public_command", "public_recipe", "public_value"]

_LOCAL_ARGUMENTS = ("checkpoint_path", "cache_dir")  # of timm.create_model: files of this machine
# a home, a root, a drive, or a way out of the current folder
_LOCAL_PATH = re.compile(r"~|[/\\]|[A-Za-z]:[/\\]|([^/\\]+[/\\])*\.\.([/\\]|$)")
_LOCAL_FOLDERS = re.compile(r"(?<![\w.~/\\-])(~|[A-Za-z]:)?[/\\]([^/\\\s]+[/\\])+")  # inside of other text
_LOCAL_SETTINGS = {"import_from": None, "device": "auto", "workers": 0, "tracker": None}


def public_value(text: str) -> str:
    """The last part of a path, and nothing of a URL: ``folder:/home/me/cats@test`` -> ``folder:cats@test``.

    Paths below the current folder, such as ``data/cats``, stay as they are, and so does other text. Of a list or a
    mapping that is written out, each value is looked at: ``{"file": "/home/me/a.pth"}`` -> ``{"file": "a.pth"}``.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return _public_structure(text)
    if "," in text and not _LOCAL_PATH.match(text):
        return ",".join(public_value(one) for one in text.split(","))
    kind, colon, path = text.partition(":") if re.match(r"\w\w+:(?!//)", text) else ("", "", text)
    if re.match(r"\w+://", path):
        path = "URL"  # which may hold hosts and passwords
    elif _LOCAL_PATH.match(path):
        path = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return _LOCAL_FOLDERS.sub("", f"{kind}{colon}{path}")


def _public_structure(text: str) -> str:
    """As it was written where nothing in it is of this machine."""
    try:
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        given = None
    if not isinstance(given, (list, dict)):  # no structure after all
        return "…" if re.search(r"[/\\]|~", text) else text
    public = _public(given)
    return text if public == given else json.dumps(public, ensure_ascii=False, default=str)


def public_command(command: str) -> str:
    """A command with such values."""
    parts = (re.fullmatch(r"([-+\w.]+=)?(.*)", argument, re.DOTALL) for argument in shlex.split(command))
    return shlex.join(f"{found[1] or ''}{public_value(found[2])}" for found in parts if found)


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
