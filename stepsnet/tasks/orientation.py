"""Images turned by EXIF, with annotations in pixels: do these belong to the upright image or to the stored one?

Tools differ in this. The sizes tell, unless an image is square, mirrored or upside down: such images are read like the
other turned images of their split, or else upright, and the user is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from .images import open_header, orientation_of, shape_of

__all__ = ["Fit", "are_stored", "fit_of", "on_turned"]

Fit = Literal["upright", "stored", "both", ""]


def fit_of(path: Path, size: tuple[int, int]) -> Fit:
    """Which of the two images has the annotations' size (width, height); "" if EXIF turns nothing, or neither has it.

    Raises:
        UnreadableImage: the file's header cannot be read.
    """
    with open_header(path) as image:
        if orientation_of(image) not in range(2, 9):
            return ""
        _, height, width = shape_of(image)
        upright, stored = (width, height) == size, image.size == size
    return "both" if upright and stored else "upright" if upright else "stored" if stored else ""


def are_stored(fits: Sequence[Fit]) -> list[bool]:
    """Whether each image of a split is read as it is stored."""
    like_others = "stored" in fits and "upright" not in fits
    return [fit == "stored" or (fit == "both" and like_others) for fit in fits]


def on_turned(split: str, names: Sequence[str], fits: Sequence[Fit]) -> list[str]:
    """A line about the images of a split whose size does not tell which of the two ways to read them."""
    unknown = [name for name, fit in zip(names, fits) if fit == "both"]
    if not unknown:
        return []
    how = "as they are stored, like the other images of the split that EXIF turns"
    if not are_stored(fits)[fits.index("both")]:
        how = "upright; if their annotations fit the stored images, remove the orientation from the files"
    which = f"{len(unknown)} of {len(names)} images of {split}, such as {unknown[0]},"
    return [
        f"{which} have an EXIF orientation, and their size does not tell whether the annotations fit the upright or "
        f"the stored image: these images are read {how}"
    ]
