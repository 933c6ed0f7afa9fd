"""What a task says about a model that it has written for others to load, and what the tasks' ``publish.py`` share."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import UserError
from ..files.reading import read_json
from ..models.trained import trained_model
from ..run_folder.checkpoint import save_weights, untied
from ..settings.config import ModelSpec, Recipe

__all__ = ["Publication", "modules_of", "publish_run_folder"]


@dataclass(frozen=True)
class Publication:
    """How a published model is found and loaded."""

    library: str  # whose format it is: timm, transformers or stepsnet
    pipeline: str  # the hub's name for what it does, such as image-classification
    usage: str  # Python code; SOURCE stands for the repository
    note: str = ""  # a paragraph below the code
    model: ModelSpec | None = None  # in place of the recipe's, if that exists on some machines only


def modules_of(recipe: Recipe, model: nn.Module) -> list[str]:
    """The modules to import before the model can be built by its name: stepsnet, the user's, or none for timm's own."""
    home = type(model).__module__.partition(".")[0]
    return [*(["stepsnet"] if home == "stepsnet" else []), *recipe.imports]


def publish_run_folder(
    run: Path, recipe: Recipe, folder: Path, classes_file: str, pipeline: str, draws: bool = True
) -> Publication:
    """Write what ``stepsnet predict`` needs from a run, for models that no other library loads.

    Args:
        draws: whether predict draws what it finds.

    Raises:
        UserError: the run has no weights or no classes, or its model was made from one in a folder.
    """
    if inner := next((one for one in recipe.model.args.values() if str(one).startswith("local-dir:")), None):
        raise UserError(
            f"push: {recipe.model.name} was made from {inner}, a folder on this machine without which nobody can build "
            "the model, expected it to be made from a model that timm knows by name"
        )
    read_json(run / classes_file, "run", list)  # before anything is written
    model = trained_model(run, recipe)
    shutil.copyfile(run / classes_file, folder / classes_file)
    save_weights(folder / "model.safetensors", untied(model, model.state_dict()))
    return Publication(
        library="stepsnet",
        pipeline=pipeline,
        usage="""\
import huggingface_hub
import stepsnet

run = stepsnet.load(huggingface_hub.snapshot_download("SOURCE"))
print(run.predict("picture.jpg"))
""",
        note="`stepsnet predict FOLDER picture.jpg` does the same with a local copy"
        + (", and draws what it finds." if draws else "."),
    )
