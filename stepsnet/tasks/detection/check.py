"""A look at a whole COCO data set before anything is trained on it; every mistake names its file and record.

What was found right is remembered in the cache folder under a checksum of the annotations and of the name, size
and time of every picture, so that only the first run of a data set waits for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from PIL import Image
from pycocotools import mask as coco_mask

from ...console import progress_bar
from ...errors import UserError
from ...files import remembered
from ..classification.data import UNREADABLE

__all__ = ["LEAST_SIDE", "check_split", "encode_segmentation", "read_annotations"]

_LAYOUT = 2  # of what is remembered
_SLACK = 1.0  # pixels that a box may reach beyond its image, by rounding
LEAST_SIDE = 0.01  # pixels of a box: below it float32 may find no area at the far side of a large image

Record = Mapping[str, Any]


def read_annotations(file: Path) -> dict[str, Any]:
    """The content of an instance JSON, of which only the three lists are looked at.

    Raises:
        UserError: the file is missing, no JSON, or has no images, annotations or categories.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"data: cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # also of the encoding
        raise UserError(f"data: {file} is no JSON: {' '.join(str(error).split())[:200]}") from None
    for key in ("images", "annotations", "categories"):
        found = content.get(key) if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
            got = f"no list of {key}" if isinstance(content, dict) else f"a {type(content).__name__}"
            raise UserError(f"data: {file} is no COCO file of instances: got {got}, expected images, annotations and "
                            "categories, each a list of records")  # fmt: skip
    return content


def check_split(file: Path, folder: Path, content: Record) -> dict[int, str]:
    """Look at every record and open every picture.

    Args:
        content: of ``file``.
        folder: of the pictures.

    Returns:
        The annotations whose box has no area or lies outside its image, with the reason, by their id: the caller
        says how many may be left out.

    Raises:
        UserError: the first of all other mistakes.
    """
    _check_images(file, folder, content)
    key = f"coco/{_fingerprint(file, folder, content)}.json"
    invalid = remembered(key, lambda: _check_records(file, folder, content))
    return {int(number): reason for number, reason in invalid.items()}


def encode_segmentation(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Polygons or RLE, compressed or not -> compressed RLE."""
    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, height, width)
    counts = segmentation["counts"]
    return {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}


def _check_records(file: Path, folder: Path, content: Record) -> dict[int, str]:
    """The annotations with a wrong box, by their id. Raises UserError for any other mistake."""
    categories = _check_categories(file, content)
    by_image: dict[int, list[Record]] = defaultdict(list)
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    seen: set[Any] = set()
    for annotation in content["annotations"]:
        number = annotation.get("id")
        if not _is_whole(number) or number in seen:
            raise UserError(f"data: {file}: annotation {number!r}: expected an id of its own, a whole number")
        seen.add(number)
        if not _is_whole(annotation.get("image_id")) or annotation["image_id"] not in sizes:
            raise UserError(f"data: {file}: annotation {number}: image_id {annotation.get('image_id')!r} is no image's")
        by_image[annotation["image_id"]].append(annotation)
    invalid: dict[int, str] = {}
    for image in progress_bar(content["images"], f"checking {file.name}"):
        _check_picture(file, folder, image)
        for annotation in by_image[image["id"]]:
            where = f"{file}: annotation {annotation['id']} of {image['file_name']}"
            _check_annotation(where, annotation, categories, *sizes[image["id"]])
            if reason := _wrong_box(annotation["bbox"], *sizes[image["id"]]):
                invalid[annotation["id"]] = f"{where}: {reason}"
    return invalid


def _check_images(file: Path, folder: Path, content: Record) -> None:
    """Names, ids and sizes, without opening anything."""
    if not content["images"]:
        raise UserError(f"data: {file} lists no images")
    seen: set[Any] = set()
    for image in content["images"]:
        number, name = image.get("id"), image.get("file_name")
        if not _is_whole(number) or number in seen:
            raise UserError(f"data: {file}: image {number!r} ({name}): expected an id of its own, a whole number")
        seen.add(number)
        if not isinstance(name, str) or not name:
            raise UserError(f"data: {file}: image {number}: got file_name {name!r}, expected the name of a file")
        absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()
        if absolute or ".." in (*PurePosixPath(name).parts, *PureWindowsPath(name).parts):
            raise UserError(f"data: {file}: image {number}: file_name {name!r} leads out of {folder}")
        for side in ("height", "width"):
            if not _is_whole(image.get(side)) or image[side] < 1:
                got = image.get(side)
                raise UserError(f"data: {file}: image {number} ({name}): got {side} {got!r}, expected pixels")


def _check_categories(file: Path, content: Record) -> set[int]:
    found: set[int] = set()
    for category in content["categories"]:
        number, name = category.get("id"), category.get("name")
        if not _is_whole(number) or number in found or not isinstance(name, str):
            raise UserError(f"data: {file}: category {number!r} ({name!r}): expected an id of its own and a name")
        found.add(number)
    if not found:
        raise UserError(f"data: {file} has no categories")
    return found


def _check_picture(file: Path, folder: Path, image: Record) -> None:
    path = folder / image["file_name"]
    try:
        with Image.open(path) as picture:  # reads the header
            width, height = picture.size
    except UNREADABLE as error:
        reason = str(error).split(":")[0]
        raise UserError(f"data: {file}: image {image['id']}: cannot read {path} as a picture: {reason}") from None
    if (height, width) != (image["height"], image["width"]):
        wanted = f"{image['width']}×{image['height']} as {file} says of image {image['id']}"
        raise UserError(f"data: {path} has {width}×{height} pixels, expected {wanted}")


def _check_annotation(where: str, annotation: Record, categories: set[int], height: int, width: int) -> None:
    category = annotation.get("category_id")
    if not _is_whole(category) or category not in categories:
        known = f"{min(categories)} to {max(categories)}" if len(categories) > 1 else str(min(categories))
        raise UserError(f"data: {where}: got category_id {category!r}, expected one of the categories, {known}")
    if annotation.get("iscrowd", 0) not in (0, 1):
        raise UserError(f"data: {where}: got iscrowd {annotation['iscrowd']!r}, expected 0 or 1")
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        raise UserError(f"data: {where}: got bbox {str(box)[:80]}, expected [x, y, width, height]")
    if reason := _wrong_segmentation(annotation.get("segmentation"), height, width):
        raise UserError(f"data: {where}: {reason}")


def _wrong_box(box: Sequence[float], height: int, width: int) -> str:
    x, y, wide, high = box
    if min(wide, high) < LEAST_SIDE:
        return f"the box {list(box)} has no area"
    inside = min(x + wide, width) - max(x, 0), min(y + high, height) - max(y, 0)
    reaches_out = min(x, y) < -_SLACK or x + wide > width + _SLACK or y + high > height + _SLACK
    if reaches_out or min(inside) < LEAST_SIDE:
        return f"the box {list(box)} lies outside its image of {width}×{height}"
    return ""


def _wrong_segmentation(segmentation: Any, height: int, width: int) -> str:
    if isinstance(segmentation, list):
        for polygon in segmentation:
            if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
                return f"got a polygon {str(polygon)[:60]}, expected x and y of at least three points"
            if not all(_is_number(value) for value in polygon):
                return "got a polygon with what is no number"
        return "" if segmentation else "the segmentation has no polygon"
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        return f"got segmentation {str(segmentation)[:60]}, expected polygons or RLE"
    if segmentation.get("size") != [height, width]:
        return f"got RLE of size {segmentation.get('size')}, expected the image's, [{height}, {width}]"
    counts = segmentation["counts"]
    if isinstance(counts, list):
        whole = all(_is_whole(count) and count >= 0 for count in counts)
        return "" if whole and sum(counts) == height * width else "the RLE does not count its image's pixels"
    if not isinstance(counts, str) or not counts:
        return f"got RLE counts of type {type(counts).__name__}, expected a list or a string"
    try:
        coco_mask.decode(encode_segmentation(segmentation, height, width))
    except (ValueError, MemoryError):
        return "the RLE does not count its image's pixels"
    return ""


def _fingerprint(file: Path, folder: Path, content: Record) -> str:
    """Raises UserError for a picture that is missing."""
    digest = hashlib.sha256(f"{_LAYOUT}\0{folder.resolve()}\0".encode())
    digest.update(file.read_bytes())
    for image in content["images"]:
        path = folder / image["file_name"]
        try:
            state = path.stat()
        except OSError as error:
            raise UserError(f"data: {file}: image {image['id']}: {path} is missing ({error.strerror})") from None
        digest.update(f"{state.st_size} {state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
