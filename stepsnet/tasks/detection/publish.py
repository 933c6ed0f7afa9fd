"""A detector as a folder that ``stepsnet predict`` takes."""

from __future__ import annotations

from pathlib import Path

from ...settings.config import DetectionRecipe
from ..publication import Publication, publish_run_folder
from .task import CATEGORIES_FILE

__all__ = ["publish"]


def publish(run: Path, recipe: DetectionRecipe, folder: Path) -> Publication:
    """Write the weights and the categories. Raises UserError as :func:`publish_run_folder` does."""
    return publish_run_folder(run, recipe, folder, CATEGORIES_FILE, "object-detection")
