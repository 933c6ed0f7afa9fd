"""Reading image files as a person sees them, for every task that reads images."""

from __future__ import annotations

import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from ..errors import UserError
from ..machine import cores
from ..output.console import progress_bar

__all__ = [
    "UnreadableImage",
    "as_image",
    "as_seen",
    "each_in_threads",
    "find_images",
    "image_shape",
    "image_sizes",
    "image_suffixes",
    "mode_of",
    "open_header",
    "open_image",
    "open_stored",
    "orientation_of",
    "pixels_allowed",
    "png_bytes",
    "shape_of",
    "stored_size",
]

# The formats that are opened. Pillow knows others that it passes to other programs (EPS to Ghostscript) or only
# recognizes.
_FORMATS = (
    *("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM"),
    *("TGA", "DDS", "ICO", "ICNS", "PCX", "SGI", "QOI", "XBM", "XPM", "PSD"),
)

_STRETCHED = {"L;2": 85, "L;4": 17}  # factors by which Pillow multiplies grey values of 2 and 4 bits
_GREYSCALE = ("1", "L", "LA", "La", "I", "F")  # among Pillow's modes; the 16-bit ones begin with I

MAX_PIXELS = "STEPSNET_MAX_IMAGE_PIXELS"  # an environment variable; a small file may claim to be a huge image
_DEFAULT_MAX_PIXELS = 2 * 89_478_485  # above which Pillow itself refuses

_pillows_bounds: list[int | None] = []  # Pillow's bound as each thread in `pixels_allowed` found it
_bounds_lock = threading.Lock()

# Pillow warns of damaged metadata, and of large images, which are checked here. Filtering inside a block of code only
# would not be thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")


T = TypeVar("T")
R = TypeVar("R")


class UnreadableImage(Exception):
    """A file that is missing, damaged, too large or not an image; the message is a short reason without the path."""


def open_image(file: Path | IO[bytes] | Image.Image, mode: str = "RGB", as_stored: bool = False) -> Image.Image:
    """Decode an image: the first frame, upright by its EXIF orientation, on white where it is transparent.

    Channels of 16 bits are scaled to 8, not clipped. :func:`as_seen` does the same to pixels that are already decoded.

    Args:
        file: a path, a file open for reading, or a Pillow image, which is treated the same way.
        mode: "RGB" or "L".
        as_stored: do not turn the image upright; for annotations of the image as it is stored (orientation.py).

    Raises:
        UnreadableImage: the file cannot be decoded.
    """
    with open_header(file) as image:
        return as_seen(image if as_stored else ImageOps.exif_transpose(image), mode, image.format)


def open_stored(path: Path) -> Image.Image:
    """Decode a label image: values and size as stored, in its own mode, or in "L" if it has one bit per pixel.

    Raises:
        UnreadableImage: the file cannot be decoded.
    """
    with open_header(path) as image:
        stretched = _STRETCHED.get(_raw_mode(image), 1)
        image.load()
        if image.mode == "1":
            return Image.fromarray(np.asarray(image).astype(np.uint8))
        return image.copy() if stretched == 1 else image.point(lambda value: value // stretched)


def _raw_mode(image: Image.Image) -> str:
    """The raw mode in which Pillow is about to read the pixels, such as "L;4"; "" if there is no single one."""
    tile = getattr(image, "tile", None)  # which only an image from a file has
    args = tile[0][3] if tile else ""
    mode = args[0] if isinstance(args, tuple) and args else args
    return mode if isinstance(mode, str) else ""


def mode_of(channels: int) -> str | None:
    """Pillow's mode for images with 1 or 3 channels; None for any other number."""
    return {1: "L", 3: "RGB"}.get(channels)


def as_seen(image: Image.Image, mode: str = "RGB", format: str | None = None) -> Image.Image:
    """Convert decoded pixels to "RGB" or "L" as a person sees them.

    Args:
        format: Pillow's name for the file's format. Pillow reads 16-bit PNG and PPM files into its 32-bit mode.

    Raises:
        UnreadableImage: the pixels have 32 bits, and the range of their values is not known.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        values = np.asarray(image, dtype=np.uint32)  # (H, W), 0 … 65535
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnreadableImage("its pixels have 32 bits, expected 8 or 16 per channel")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        white = Image.new("RGBA", seen.size, "white")
        image = Image.alpha_composite(white, seen)
    return image.convert(mode)


def stored_size(path: Path) -> tuple[int, int]:
    """(width, height) as the image is stored, from the file's header alone.

    Raises:
        UnreadableImage: the header cannot be read.
    """
    with open_header(path) as image:
        return image.size


def image_sizes(path: Path) -> set[tuple[int, int]]:
    """(width, height) as the image is stored, and when it is upright, from the file's header alone.

    Raises:
        UnreadableImage: the header cannot be read.
    """
    with open_header(path) as image:
        _, height, width = shape_of(image)
        return {image.size, (width, height)}


def image_shape(file: Path | IO[bytes]) -> tuple[int, int, int]:
    """:func:`shape_of` a file, from its header alone.

    Raises:
        UnreadableImage: the header cannot be read.
    """
    with open_header(file) as image:
        return shape_of(image)


def shape_of(image: Image.Image) -> tuple[int, int, int]:
    """(channels, height, width) of an image when it is upright; it has one channel if it is stored in greyscale.

    Raises:
        UserError: it is not an image; a user's function may return something else.
    """
    if not isinstance(image, Image.Image):
        raise UserError(f"data: got {type(image).__name__} from read, expected a Pillow image")
    width, height = image.size
    if orientation_of(image) in (5, 6, 7, 8):  # on its side
        width, height = height, width
    return 1 if image.mode.partition(";")[0] in _GREYSCALE else 3, height, width


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation: 1 if there is nothing to turn, and always 1 for a TIFF, which Pillow turns itself."""
    return 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)


@cache
def _formats() -> tuple[str, ...]:
    Image.init()  # a build of Pillow may lack some
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@cache
def image_suffixes() -> frozenset[str]:
    """The file name suffixes, such as ``.jpg``, of the formats that are read."""
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in _formats())


def find_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images below a folder, known by their suffixes, and the other files, both in order.

    Hidden files and folders are left out. Symbolic links are followed, each folder once, except links to this folder or
    to one that contains it: a link upwards would bring in the images of other classes.
    """
    images: list[Path] = []
    others: list[Path] = []
    real = Path(os.path.realpath(folder))
    for path in _files_below(folder, {str(one) for one in (real, *real.parents)}):
        (images if path.suffix.lower() in image_suffixes() else others).append(path)
    return images, others


def _files_below(folder: Path, visited: set[str]) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield Path(entry.path)
        elif (real := os.path.realpath(entry.path)) not in visited:
            visited.add(real)
            yield from _files_below(Path(entry.path), visited)


def each_in_threads(do: Callable[[T], R], items: Sequence[T], description: str) -> Iterator[R]:
    """Decode images in threads: yield ``do(item)`` for each item, in order, with a progress bar. An error ends all."""
    with ThreadPoolExecutor(cores()) as pool:  # decoding releases the interpreter's lock
        try:
            yield from progress_bar(pool.map(do, items), description, len(items))
        except BaseException:  # Ctrl-C or an error in the caller, too, ends it at once
            pool.shutdown(cancel_futures=True)
            raise


def as_image(given: Any) -> Path | Image.Image:
    """An image given in Python: a path, a Pillow image, an array (H, W) or (H, W, C), or a tensor (H, W) or (C, H, W).

    Arrays and tensors hold bytes, or floats from 0 to 1. C is 1 (gray), 3 (RGB) or 4 (RGBA).

    Raises:
        UserError: it is none of these, or has no pixels.
    """
    if isinstance(given, (str, os.PathLike)):
        return Path(given)
    if isinstance(given, Image.Image) and all(given.size):
        return given
    if isinstance(given, Image.Image):
        raise UserError(f"predict: got an image of {given.width} × {given.height} pixels, expected some pixels")
    if not isinstance(given, (np.ndarray, Tensor)):
        raise UserError(f"predict: got a {type(given).__name__}, expected a path, a Pillow image, an array or a tensor")
    shape, kind = tuple(given.shape), given.dtype
    if isinstance(given, Tensor):
        given = given.float() if given.dtype == torch.bfloat16 else given  # which NumPy does not have
        values: np.ndarray = (given.movedim(0, -1) if given.ndim == 3 else given).detach().cpu().numpy()
    else:
        values = given
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim != 2 and not (values.ndim == 3 and values.shape[-1] in (3, 4)):
        expected = "(H, W) or (C, H, W)" if isinstance(given, Tensor) else "(H, W) or (H, W, C)"
        raise UserError(f"predict: got the shape {shape}, expected {expected} with C = 1, 3 or 4")
    if not values.size:
        raise UserError(f"predict: got the shape {shape}, expected some pixels")
    if values.dtype.kind == "f" and values.min() >= 0 and values.max() <= 1:
        values = (values * 255).round().astype(np.uint8)
    if values.dtype != np.uint8:
        raise UserError(f"predict: got {kind}, expected bytes or floats from 0 to 1; run.model takes normalized inputs")
    return Image.fromarray(np.ascontiguousarray(values))


@contextmanager
def open_header(file: Path | IO[bytes] | Image.Image) -> Iterator[Image.Image]:
    """Open an image without decoding it. Any exception inside the block but a UserError becomes an UnreadableImage."""
    if isinstance(file, Path):
        _check_regular(file)
    try:
        if isinstance(file, Image.Image):
            yield file
            return
        with pixels_allowed() as most, Image.open(file, formats=_formats()) as image:
            _check_pixels(image.size, most)
            yield image
    except (UnreadableImage, UserError):
        raise
    except Exception as error:  # Pillow's plugins raise whatever parsing raises: struct.error, IndexError, …
        raise UnreadableImage(_reason(error)) from None


def _check_regular(path: Path) -> None:
    """Raises UnreadableImage if this is not a regular file: opening a pipe would wait forever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableImage("it is not a file")
    except FileNotFoundError:
        raise UnreadableImage("no such file") from None
    except (OSError, ValueError) as error:
        raise UnreadableImage(_reason(error)) from None


@contextmanager
def pixels_allowed() -> Iterator[int]:
    """Yield how many pixels an image may have; inside the block, Pillow opens and crops images of up to that many.

    Pillow has a single bound for the whole process. It is raised only if the environment sets another one, and is
    restored when the last of several threads leaves the block.

    Raises:
        UserError: the environment variable is not a number.
    """
    text = os.environ.get(MAX_PIXELS)
    if text is None:
        yield _DEFAULT_MAX_PIXELS
        return
    if not text.isdecimal():
        raise UserError(f"{MAX_PIXELS}: got {text!r}, expected a number of pixels")
    most = int(text)
    with _bounds_lock:
        _pillows_bounds.append(Image.MAX_IMAGE_PIXELS)
        if Image.MAX_IMAGE_PIXELS is not None:
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, -(-most // 2))  # Pillow refuses above twice its bound
    try:
        yield most
    finally:
        with _bounds_lock:
            before = _pillows_bounds.pop()
            if not _pillows_bounds:
                Image.MAX_IMAGE_PIXELS = before


def _check_pixels(size: tuple[int, int], most: int) -> None:
    if size[0] * size[1] > most:
        raise UnreadableImage(
            f"it has {size[0]} × {size[1]} pixels, expected at most {most:,}; set {MAX_PIXELS} to allow more"
        )


def _reason(error: BaseException) -> str:
    """The reason in an exception's message, without the path that Pillow repeats there."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "cannot identify image file"
    if isinstance(error, Image.DecompressionBombError):  # Pillow's plugins and Image.open check before we do
        return f"{str(error).partition(',')[0]}; set {MAX_PIXELS} to allow more"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()).split(" '")[0].split(":")[0]
    return text[:200] or type(error).__name__


def png_bytes(image: Image.Image) -> bytes:
    """An image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
