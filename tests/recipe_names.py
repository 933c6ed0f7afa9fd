"""The shipped recipes by what tests do with them."""

import dataclasses
import json

from stepsnet.recipes import RECIPES, find_recipe

NAMES = list(RECIPES)
AT_SCALE = [name for name in NAMES if name.split("/")[0] in ("imagenet", "deeper", "ablations")]
LANGUAGE = [name for name in NAMES if find_recipe(name).task == "language"]
DETECTION = [name for name in NAMES if find_recipe(name).task == "detection"]
SMALL = [name for name in NAMES if name not in AT_SCALE and find_recipe(name).task == "classification"]
SEGMENTATION = [name for name in NAMES if find_recipe(name).task == "segmentation"]


def plain(value):
    return json.loads(json.dumps(value, default=dataclasses.asdict))
