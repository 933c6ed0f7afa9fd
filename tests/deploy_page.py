"""The function that docs/deploy.md gives for the images of an exported model."""

import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

PAGE = Path(__file__).parent.parent / "docs" / "deploy.md"


def documented_preprocess():
    """The function of the page: numpy and Pillow alone."""
    (code,) = re.findall(r"^def preprocess.*?\n\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(code, names)
    return names["preprocess"]
