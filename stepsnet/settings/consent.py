"""What a recipe makes libraries fetch from the network, and whether the user has asked for it.

This package's recipes and the command line count as the user's own words. A recipe from a file, such as the
``config.yaml`` of somebody's run, does not: what it names is fetched only if the user has named it too, in this command
or in an earlier one, or if the environment has ``STEPSNET_FETCH=1``. ``fetched.json`` in the cache folder holds what
was asked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.cache import cache_folder, locked_entry
from ..files.writing import write_atomically
from .config import Recipe
from .overrides import to_plain

__all__ = [
    "DOWNLOADING",
    "fetched_by",
    "is_half_downloaded",
    "is_of_weights",
    "remember_as_asked",
    "require_asked_for",
    "require_or_remember",
]

DOWNLOADING = ".downloading"  # a file in a data folder whose download is not complete

# an address, a model or data of the hub, or data that torchvision downloads if they are missing
_FETCHED = re.compile(r"[A-Za-z][\w+.-]+://|(hf[-_]hub|timm|transformers|hfds|cifar100?):")
_FOLDERS = ("transformers", "hfds", "cifar10", "cifar100")  # kinds whose values may also name a local folder
_NAMES_OF_MODELS = ("backbone", "model", "name")  # keys, the innermost first, beside a model's args or in them


def fetched_by(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by their keys, that make libraries fetch something that is not here yet."""
    found = _found(dict(recipe) if isinstance(recipe, Mapping) else to_plain(recipe))
    return {key: value for key, value, _ in found}


def is_half_downloaded(folder: str | Path) -> bool:
    """Whether a download into this folder is still going on, or was cut off."""
    return (Path(folder) / DOWNLOADING).exists()


def require_asked_for(
    recipe: Recipe, where: Path, typed: Iterable[str] = (), only: Sequence[str] = ("",), has_weights: bool = False
) -> None:
    """Refuse to fetch what only a file has asked for, and remember what this command names.

    Args:
        where: the file that the recipe comes from.
        typed: the keys given in this command; what they name is remembered.
        only: prefixes of the keys that matter.
        has_weights: the model's weights are here, so that a setting that only asks for weights fetches nothing.

    Raises:
        UserError: something was not asked for; the message has the first such key, and what to type.
    """
    if os.environ.get("STEPSNET_FETCH") == "1":
        return
    asked, before = set(), _remembered()
    for key, value, entry in _found(to_plain(recipe)):
        if has_weights and is_of_weights(key):
            continue
        if any(key == word or key.startswith(f"{word}.") for word in typed):
            asked.add(entry)
        elif entry not in before and key.startswith(tuple(only)):
            how = f"--data {shlex.quote(value)}" if key == "data" else shlex.quote(_line(key, value))
            raise UserError(
                f"{where}: {key} is {value!r}, which is fetched from the network only if you ask for it: "
                f"expected {how} on the command line too (once is enough), or STEPSNET_FETCH=1 in the environment"
            )
    _remember(asked)


def remember_as_asked(recipe: Recipe) -> None:
    """Remember everything that a recipe fetches as asked for, since the user has named the recipe."""
    _remember({entry for _, _, entry in _found(to_plain(recipe))})


def require_or_remember(recipe: Recipe, file: Path | None, typed: Iterable[str]) -> None:
    """Call :func:`require_asked_for` for a recipe from a file, and :func:`remember_as_asked` for any other.

    Commands that begin something call this. ``file`` is None for recipes of this package and of the user's own program.
    """
    if file:
        require_asked_for(recipe, file, typed)
    else:
        remember_as_asked(recipe)


def _found(values: Any, key: str = "", model: str = "") -> Iterator[tuple[str, Any, str]]:
    """Key and value of each setting that fetches something, and the entry by which it is remembered.

    A model's entry says what is fetched, wherever in a recipe it is named.

    Args:
        model: the name of the innermost model that the setting belongs to, such as resnet18 inside stepify.
    """
    if isinstance(values, dict):
        if key:  # not for the recipe itself, whose name is not that of its model
            model = next((name for part in _NAMES_OF_MODELS if isinstance(name := values.get(part), str)), model)
        for name, value in values.items():
            yield from _found(value, f"{key}.{name}" if key else name, model)
    elif isinstance(values, list):
        for value in values:
            yield from _found(value, key, model)
    elif values and key.rpartition(".")[2] == "pretrained":  # any value that timm takes for a yes
        yield key, values, f"weights of {model}" if model else _line(key, values)
    elif isinstance(values, str) and values:
        kind, _, rest = values.partition(":")
        where = rest if kind == "transformers" else rest.partition("@")[0]
        place = Path(where.partition(":")[0] if kind == "hfds" else where)  # without the name of a part
        is_here = kind in _FOLDERS and place.is_dir() and not is_half_downloaded(place)
        named = key.endswith(".hf_hub_id") or (key == "tokenizer" and values == "gpt2")
        if (named or _FETCHED.match(values)) and not is_here and key not in ("name", "title"):
            # without its key: one model may be named under model, under baseline, and in the recipes of their runs
            yield key, values, f"model {values}" if key.startswith(("model.", "baseline.")) else _line(key, values)


def is_of_weights(key: str) -> bool:
    """Whether a setting of a model asks for weights alone: ``pretrained``, or the ``weights`` of a grown model."""
    return key.endswith((".pretrained", ".args.weights"))


def _line(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _remembered() -> set[str]:
    try:
        return set(json.loads((cache_folder() / "fetched.json").read_text(encoding="utf-8")))
    except (OSError, RuntimeError, ValueError, TypeError):
        return set()


def _remember(lines: set[str]) -> None:
    """Remember these entries. If the cache cannot be written, the user has to ask again next time."""
    if lines <= _remembered():
        return
    with suppress(UserError, RuntimeError), locked_entry(file := cache_folder() / "fetched.json"):
        # read again: another process may have written meanwhile
        write_atomically(file, json.dumps(sorted(lines | _remembered()), indent=1) + "\n")
