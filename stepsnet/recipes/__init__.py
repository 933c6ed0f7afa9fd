"""Recipes by name: each a function that returns a whole :class:`Recipe`.

Names are looked up without importing torch, so that listing them is quick.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import Recipe
from ..errors import UserError, nearest
from . import ablations, ade20k, camvid, coco, deeper, imagenet, small, small_ablations, text, wikitext103

__all__ = ["find_recipe", "recipe_names", "recipes"]


def recipes() -> dict[str, Callable[[], Recipe]]:
    return {
        name: make
        for family in (small, small_ablations, text, imagenet, deeper, ablations, coco, ade20k, camvid, wikitext103)
        for name, make in family.RECIPES.items()
    }


def recipe_names() -> list[str]:
    return list(recipes())


def find_recipe(name: str) -> Recipe:
    """Raises UserError, with the nearest names, for a recipe that does not exist."""
    known = recipes()
    if name not in known:
        raise UserError(
            f"recipe: got {name!r}, expected one that `stepsnet recipes` lists or a .yaml file{nearest(name, known)}"
        )
    return known[name]()
