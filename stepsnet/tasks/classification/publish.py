"""A classifier in timm's format: ``timm.create_model("hf-hub:…")`` and ``"local-dir:…"`` load it.

A model that timm cannot create by name, such as one from ``stepify``, becomes a folder that ``stepsnet predict`` takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
from timm.models import save_for_hf

from ...errors import UserError
from ...files.writing import write_atomically
from ...models.build import is_elsewhere
from ...models.trained import trained_model
from ...settings.config import ClassificationRecipe, ModelSpec
from ..class_names import CLASSES_FILE, save_classes
from ..images import mode_of
from ..publication import Publication, modules_of, publish_run_folder
from .inputs import data_config
from .predict import classes_of

__all__ = ["publish"]

# in timm's config for a model's name: where timm's own weights come from, and their licence
_OF_OTHER_WEIGHTS = ("license", "tag", "origin_url", "notes", "paper_ids", "paper_name")
_USAGE = """\
import timm
from PIL import Image, ImageOps
{imports}
model = timm.create_model("hf-hub:SOURCE", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = transform(ImageOps.exif_transpose(Image.open("picture.jpg")).convert("{mode}"))
print(model.pretrained_cfg["label_names"][model(image[None]).argmax()])
"""
_NOTE = """\
A local copy is loaded as `local-dir:FOLDER`. In training, pictures were turned upright, as above; transparent ones were
set on white, and channels of 16 bits were scaled to 8."""


def _say_num_classes_once(file: Path) -> dict[str, Any]:
    """Remove ``num_classes`` from ``model_args``: Transformers passes both to timm, which would get the number twice.

    Returns:
        The config after the change.
    """
    config = json.loads(file.read_text())
    config.get("model_args", {}).pop("num_classes", None)
    write_atomically(file, json.dumps(config, indent=2) + "\n")
    return config


def publish(run: Path, recipe: ClassificationRecipe, folder: Path) -> Publication:
    """Write weights, and a config with the model's arguments, the class names and how images become inputs.

    Raises:
        UserError: the run has no weights, or timm cannot save the model.
    """
    elsewhere = is_elsewhere(recipe.model.name)  # a config there has timm's name and arguments
    if not timm.is_model(recipe.model.name) and not elsewhere:
        return publish_run_folder(run, recipe, folder, CLASSES_FILE, "image-classification", draws=False)
    model = trained_model(run, recipe)
    classes = classes_of(run, model)
    spec = data_config(recipe, model)
    try:
        config = {"label_names": classes, "pretrained_cfg": dict.fromkeys(_OF_OTHER_WEIGHTS)}
        save_for_hf(model, str(folder), model_config=config, safe_serialization=True, data_config=spec)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"push: timm cannot save {recipe.model.name}: {type(error).__name__}: {error}") from error
    written = _say_num_classes_once(folder / "config.json")
    save_classes(folder, classes)
    modules = modules_of(recipe, model)
    imports = "".join(f"\nimport {module}  # registers the model with timm" for module in modules)
    mode = mode_of(spec["input_size"][0])
    usage = _USAGE.format(imports=f"{imports}\n" if imports else "", mode=mode)
    named = ModelSpec(written["architecture"], written.get("model_args", {}) | {"num_classes": written["num_classes"]})
    return Publication("timm", "image-classification", usage, _NOTE, named if elsewhere else None)
