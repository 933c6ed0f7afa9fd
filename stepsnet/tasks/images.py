"""Reading image files: what every task that reads images needs."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

__all__ = ["UNREADABLE", "open_image", "why_unreadable"]

# what Pillow raises for a file that is missing, damaged, too large or not an image
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def open_image(path: Path, mode: str = "RGB") -> Image.Image:
    """Decode an image file.

    Args:
        mode: one of Pillow's modes, to which the image is converted.

    Raises:
        one of :data:`UNREADABLE`: the file cannot be decoded.
    """
    with Image.open(path) as image:
        return image.convert(mode)


def why_unreadable(path: Path, error: BaseException) -> str:
    """A short reason for an exception of :data:`UNREADABLE`, without the path that Pillow repeats in it."""
    if not path.exists():
        return "no such file"
    return " ".join(str(error).split()).split(" '")[0].split(":")[0]
