"""Recipes by name. Each module reads as a table: the settings of a base, and the rows that derive from it.

Nothing here imports torch, so that listing the recipes is quick.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import UserError, nearest
from ..files.reading import yaml_file
from ..settings.config import Recipe
from ..settings.overrides import read_recipe
from . import ablations, ade20k, camvid, cifar10, coco, deeper, digits, imagenet, images, pennfudan, text, wikitext103

__all__ = ["RECIPES", "find_or_read", "find_recipe", "matching"]

RECIPES: dict[str, Recipe] = {
    name: recipe
    for module in (
        *(digits, images, cifar10, text, camvid, pennfudan),
        *(imagenet, deeper, ablations, coco, ade20k, wikitext103),
    )
    for name, recipe in module.RECIPES.items()
}


def find_recipe(name: str) -> Recipe:
    """Return a copy of a recipe. Raises UserError, with the nearest names, if it does not exist."""
    if name not in RECIPES:
        raise UserError(
            f"recipe: got {name!r}, expected one that `stepsnet recipes` lists or a .yaml file{nearest(name, RECIPES)}"
        )
    return copy.deepcopy(RECIPES[name])


def find_or_read(recipe: str | Path) -> Recipe:
    """Return a recipe by its name, or from a YAML file. Raises UserError if there is none, or the file is wrong."""
    file = yaml_file(recipe)
    return read_recipe(file) if file else find_recipe(str(recipe))


def matching(patterns: Sequence[str]) -> list[Recipe]:
    """Return the recipes whose names match any of the patterns, such as ``digits/*``, each once.

    Raises:
        UserError: no recipe matches a pattern; the message names the nearest ones.
    """
    names = [name for name in RECIPES if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            find_recipe(pattern)
    return [find_recipe(name) for name in names]
