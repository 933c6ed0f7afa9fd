"""A segmenter as a folder that ``stepsnet predict`` takes."""

from __future__ import annotations

from pathlib import Path

from ...settings.config import SegmentationRecipe
from ..class_names import CLASSES_FILE
from ..publication import Publication, publish_run_folder

__all__ = ["publish"]


def publish(run: Path, recipe: SegmentationRecipe, folder: Path) -> Publication:
    """Write the weights and the class names. Raises UserError as :func:`publish_run_folder` does."""
    return publish_run_folder(run, recipe, folder, CLASSES_FILE, "image-segmentation")
