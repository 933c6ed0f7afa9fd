"""Commands and settings without anything that says where files are on this machine, to be recorded and published."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

__all__ = ["public", "public_command", "public_value", "without_place"]

# a home, a root, a drive, or a way out of the current folder
_LOCAL_PATH = re.compile(r"~|[/\\]|[A-Za-z]:[/\\]|([^/\\]+[/\\])*\.\.([/\\]|$)")
_LOCAL_FOLDERS = re.compile(r"(?<![\w.~/\\-])(~|[A-Za-z]:)?[/\\]([^/\\\s]+[/\\])+")  # inside other text


def public_value(text: str) -> str:
    """The last part of a path, and nothing of a URL: ``folder:/home/me/cats@test`` -> ``folder:cats@test``.

    Paths below the current folder, such as ``data/cats``, stay as they are, and so does other text. In a list or a
    mapping that is written out, each value is treated so: ``{"file": "/home/me/a.pth"}`` -> ``{"file": "a.pth"}``.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return _public_structure(text)
    if "," in text and not _LOCAL_PATH.match(text):
        return ",".join(public_value(one) for one in text.split(","))
    kind, colon, path = text.partition(":") if re.match(r"\w\w+:(?!//)", text) else ("", "", text)
    if re.match(r"\w+://", path):
        path = "URL"  # it may hold hosts and passwords
    elif _LOCAL_PATH.match(path):
        path = re.split(r"[/\\]", re.sub(r"[/\\]+(?=@|$)", "", path))[-1] or path
    return _LOCAL_FOLDERS.sub("", f"{kind}{colon}{path}")


def without_place(data: str) -> str:
    """A data set's name without its folder: ``folder:data/cifar10`` -> ``folder:cifar10``; a hub's stays whole."""
    return public_value(data) if data.startswith("hfds:") else re.sub(r"[^/:]*/+(?=[^/])", "", data).rstrip("/")


def _public_structure(text: str) -> str:
    """A list or mapping, as it was written if nothing in it belongs to this machine."""
    try:
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        given = None
    if not isinstance(given, (list, dict)):  # no structure after all
        return "…" if re.search(r"[/\\]|~", text) else text
    cleaned = public(given)
    return text if cleaned == given else json.dumps(cleaned, ensure_ascii=False, default=str)


def public_command(command: str) -> str:
    """A command with each value as :func:`public_value` makes it."""
    parts = (re.fullmatch(r"([-+\w.]+=)?(.*)", argument, re.DOTALL) for argument in shlex.split(command))
    return shlex.join(f"{found[1] or ''}{public_value(found[2])}" for found in parts if found)


def public(value: Any) -> Any:
    """A value of YAML or JSON with each text in it as :func:`public_value` makes it."""
    if isinstance(value, dict):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    return public_value(value) if isinstance(value, str) else value
