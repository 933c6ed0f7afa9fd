"""The check of a COCO data set before training; every error names its file and record.

The result is kept in the cache folder under a checksum of the annotations and of the name, size and time of every
image, so that only the first run on a data set waits for it.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from pycocotools import mask as coco_mask
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...errors import UserError
from ...files.cache import cached_json
from ...files.reading import read_json
from ...files.writing import is_encodable
from ..images import UnreadableImage, each_in_threads, image_sizes, open_image
from ..orientation import Fit, are_stored, fit_of, on_turned

__all__ = ["MIN_SIDE", "Checked", "check_split", "encode_segmentation", "read_annotations", "without_slivers", "Record"]

_CHECK_VERSION = 13  # a new number discards cached results
_SLACK = 1.0  # pixels by which rounding may move a box beyond its image
MIN_SIDE = 0.01  # pixels: at the far side of a large image, float32 may see no area in a smaller box

_LEAST_NUMBERS = 6  # in a polygon that covers anything: three points
_NO_SEGMENTATION: tuple[Any, ...] = (None, [], [[]], {})  # what programs write for a box without a mask

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Checked:
    """What the check of a split has found that a recipe may accept."""

    # the reason for each annotation id
    invalid: dict[int, str]  # the box cannot be used
    reaching_out: dict[int, str]  # a part of the box is outside the image
    wrong_masks: dict[int, str]  # the box can be learnt, but there is no mask that can
    without_mask: int  # how many of these have only a box
    empty_masks: list[str]  # annotations whose polygons are valid, but cover the middle of no pixel
    stored: list[int]  # ids of the images whose annotations are not of the upright image
    notices: list[str]  # what the user should know about them


class _StrictRecord(BaseModel):
    """Each field's description says what is expected; neither "3" nor true counts as a number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Image(_StrictRecord):
    id: int = Field(description="an integer")
    file_name: str = Field(min_length=1, description="the name of a file")
    height: int = Field(ge=1, description="a positive integer, in pixels")
    width: int = Field(ge=1, description="a positive integer, in pixels")


class _Category(_StrictRecord):
    id: int = Field(description="an integer")
    name: str = Field(description="a string")


class _Annotation(_StrictRecord):
    id: int = Field(description="an integer")
    image_id: int = Field(description="the id of an image")
    category_id: int = Field(description="the id of a category")
    area: float | None = Field(
        default=None, ge=0, lt=2**48, description="a number of pixels, or null for that of the mask or box"
    )
    iscrowd: Literal[0, 1] = Field(default=0, description="0 or 1")
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)] = Field(description="[x, y, width, height]")


def read_annotations(file: Path) -> dict[str, Any]:
    """Read a JSON file of instances, checking only that it has its three lists.

    Raises:
        UserError: the file is missing, is not JSON, or lacks a list of images, annotations or categories.
    """
    content = read_json(file, "data", allow_nan=True)
    for key in ("images", "annotations", "categories"):
        found = content.get(key) if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
            got = f"no list of {key}" if isinstance(content, dict) else f"a {type(content).__name__}"
            raise UserError(
                f"data: {file} is not a COCO file of instances: got {got}, expected images, annotations and "
                "categories, each a list of records"
            )
    return content


def check_split(file: Path, folder: Path, content: Record) -> Checked:
    """Check every record, and decode every image.

    Args:
        file: the JSON file, for messages.
        folder: the folder of the images.
        content: the content of ``file``.

    Returns:
        The boxes that have no area or are not inside their image, and the masks that are missing or wrong: the caller
        decides how many may be left out or cut, and whether masks are needed.

    Raises:
        UserError: there is any other mistake; the first one is reported.
    """
    _check_images(file, folder, content["images"])
    key = f"coco/{_fingerprint(file, folder, content)}.json"
    found = cached_json(key, lambda: asdict(_check_records(file, folder, content)))
    return TypeAdapter(Checked).validate_python(found)  # JSON has turned the ids into strings


def encode_segmentation(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Encode polygons or RLE, compressed or not, as compressed RLE for an image of ``height`` × ``width`` pixels."""
    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, height, width)
    counts = segmentation["counts"]
    return {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}


def without_slivers(annotation: Record) -> Record:
    """The annotation without polygons of fewer than three points, which pycocotools would take for boxes."""
    parts = annotation.get("segmentation")
    if not isinstance(parts, list) or all(len(part) >= _LEAST_NUMBERS for part in parts):
        return annotation
    return {**annotation, "segmentation": [part for part in parts if len(part) >= _LEAST_NUMBERS]}


def _check_images(file: Path, folder: Path, images: Sequence[Record]) -> None:
    """Check names, ids and sizes, without opening a file."""
    _check_ids(file, "image", images)
    numbers: dict[PurePosixPath, int] = {}
    for image in images:
        where = f"{file}: image {image['id']} ({image.get('file_name')})"
        _check_record(_Image, image, where)
        name = image["file_name"]
        path, in_windows = PurePosixPath(name), PureWindowsPath(name)
        absolute = path.is_absolute() or in_windows.is_absolute()
        if absolute or "\0" in name or ".." in (*path.parts, *in_windows.parts):
            raise UserError(f"data: {where}: got file_name {name!r}, expected a file inside of {folder}")
        if (other := numbers.setdefault(path, image["id"])) != image["id"]:  # ./1.png is 1.png
            raise UserError(f"data: {where}: got the file of image {other}, expected one of its own")


def _check_records(file: Path, folder: Path, content: Record) -> Checked:
    """Raises UserError for a mistake that no recipe accepts."""
    _check_ids(file, "category", content["categories"])
    _check_ids(file, "annotation", content["annotations"], may_be_empty=True)
    for category in content["categories"]:
        _check_record(_Category, category, f"{file}: category {category['id']}")
        if not is_encodable(category["name"]):
            got = f"got name {category['name']!r}, expected text that UTF-8 can encode"
            raise UserError(f"data: {file}: category {category['id']}: {got}")
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    by_image: dict[int, list[Record]] = defaultdict(list)
    for annotation in content["annotations"]:
        image = images.get(annotation.get("image_id")) if _is_integer(annotation.get("image_id")) else None
        if image is None:
            got = f"got image_id {annotation.get('image_id')!r}, expected the id of an image"
            raise UserError(f"data: {file}: annotation {annotation['id']}: {got}")
        by_image[image["id"]].append(annotation)
    found = Checked({}, {}, {}, 0, [], [], [])
    without_mask = 0
    fits: list[Fit] = []
    checked = each_in_threads(partial(_check_file, file, folder), content["images"], f"checking {file.name}")
    for fit, image in zip(checked, content["images"]):
        fits.append(fit)
        size = image["height"], image["width"]
        for annotation in by_image[image["id"]]:
            where = f"annotation {annotation['id']} of {image['file_name']}"
            _check_record(_Annotation, annotation, f"{file}: {where}")
            if annotation["category_id"] not in categories:
                known = f"{min(categories)} to {max(categories)}" if len(categories) > 1 else str(min(categories))
                got = f"got category_id {annotation['category_id']}, expected one of the categories, {known}"
                raise UserError(f"data: {file}: {where}: {got}")
            if reason := _wrong_box(annotation["bbox"], *size):
                found.invalid[annotation["id"]] = f"{where}: {reason}"
                continue
            if reason := _reaches_out(annotation["bbox"], *size):
                found.reaching_out[annotation["id"]] = f"{where}: {reason}"
            if reason := _wrong_segmentation(annotation.get("segmentation"), *size):
                without_mask += annotation.get("segmentation") in _NO_SEGMENTATION
                found.wrong_masks[annotation["id"]] = f"{where}: {reason}"
            elif _covers_no_pixel(annotation, *size):
                found.empty_masks.append(where)
    if without_mask == len(content["annotations"]) - len(found.invalid):  # only boxes: a reason for each adds nothing
        found.wrong_masks.clear()
    stored = [image["id"] for image, is_stored in zip(content["images"], are_stored(fits)) if is_stored]
    notices = on_turned(file.name, [image["file_name"] for image in content["images"]], fits)
    return replace(found, without_mask=without_mask, stored=stored, notices=notices)


def _check_ids(file: Path, what: str, records: Sequence[Record], may_be_empty: bool = False) -> None:
    """Raises UserError if an id is not an integer or not unique, or if there are no records and there must be some."""
    if not records and not may_be_empty:
        raise UserError(f"data: {file} has no {what}, expected at least one")
    seen: set[Any] = set()
    for record in records:
        number, name = record.get("id"), record.get("file_name") or record.get("name")
        if not _is_integer(number) or number in seen:
            named = f"{what} {number!r}{f' ({name})' if name else ''}"
            raise UserError(f"data: {file}: {named}: got id {number!r}, expected an integer that no other {what} has")
        seen.add(number)


def _check_record(kind: type[_StrictRecord], record: Record, where: str) -> None:
    """Raises UserError for the first field that is wrong."""
    try:
        kind.model_validate(record)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        got = repr(record[key])[:80] if key in record else "nothing"
        raise UserError(f"data: {where}: got {key} {got}, expected {kind.model_fields[key].description}") from None


def _check_file(file: Path, folder: Path, image: Record) -> Fit:
    """Raises UserError if an image does not have the size in its record, or cannot be decoded as it is for training."""
    path, size = folder / image["file_name"], (image["width"], image["height"])
    try:
        fit = fit_of(path, size)
        fits = open_image(path, as_stored=fit == "stored").size == size
        sizes = set() if fits else image_sizes(path)
    except UnreadableImage as error:
        raise UserError(f"data: {file}: image {image['id']}: cannot read {path} as an image: {error}") from None
    if not fits:
        expected = f"{image['width']}×{image['height']} as {file} says of image {image['id']}"
        got = " or ".join(f"{width}×{height}" for width, height in sorted(sizes))
        raise UserError(f"data: {path}: got {got} pixels, expected {expected}")
    return fit


def _wrong_box(box: Sequence[float], height: int, width: int) -> str:
    """Why a box cannot be used; "" if it can."""
    x, y, wide, high = box
    if min(wide, high) < MIN_SIDE:
        return f"the box {list(box)} has no area"
    inside = min(x + wide, width) - max(x, 0), min(y + high, height) - max(y, 0)
    return f"the box {list(box)} lies outside its image of {width}×{height}" if min(inside) < MIN_SIDE else ""


def _reaches_out(box: Sequence[float], height: int, width: int) -> str:
    """Say that a box reaches further beyond its image than rounding explains; "" if it does not."""
    x, y, wide, high = box
    beyond = max(-x, -y, x + wide - width, y + high - height)
    return f"the box {list(box)} extends beyond its image of {width}×{height}" if beyond > _SLACK else ""


def _wrong_segmentation(segmentation: Any, height: int, width: int) -> str:
    """Why a segmentation cannot be used; "" if it can."""
    if segmentation in _NO_SEGMENTATION:
        return "got no segmentation, expected polygons or RLE"
    if isinstance(segmentation, list):
        # why each part covers nothing, or "" if it covers something; beside such a part, the others are mere slivers
        covers_nothing = []
        for polygon in segmentation:
            got = f"got a polygon {str(polygon)[:60]}"
            few = f"{got}, expected x and y of at least three points"
            outside = f"{got}, expected points in the image of {width}×{height}"
            if not isinstance(polygon, list) or not polygon or len(polygon) % 2:
                return few
            if not all(_is_number(value) for value in polygon):
                return f"{got}, expected finite numbers"
            if not _is_near(polygon[::2], width) or not _is_near(polygon[1::2], height):
                return outside
            if len(polygon) < _LEAST_NUMBERS:
                covers_nothing.append(few)
            else:
                meets = _meets(polygon[::2], width) and _meets(polygon[1::2], height)
                covers_nothing.append("" if meets else outside)
        return "" if "" in covers_nothing else covers_nothing[0]
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        return f"got segmentation {str(segmentation)[:60]}, expected polygons or RLE"
    if segmentation.get("size") != [height, width]:
        return f"got RLE of size {segmentation.get('size')}, expected the image's, [{height}, {width}]"
    counts = segmentation["counts"]
    wrong = f"got RLE counts {str(counts)[:60]}, expected a sum of {height * width}, the pixels of the image"
    if not isinstance(counts, list | str):
        return f"got RLE counts of type {type(counts).__name__}, expected a list or a string"
    runs = counts if isinstance(counts, list) else _runs_of(counts)
    if not all(_is_integer(run) and run >= 0 for run in runs) or sum(runs) != height * width:
        return wrong
    return "" if sum(runs[1::2]) else f"got RLE counts {str(counts)[:60]}, expected a mask of at least one pixel"


def _runs_of(counts: str) -> list[int]:
    """The run lengths in COCO's compressed RLE; [-1] if it is malformed.

    They are needed because pycocotools leaves pixels that no run covers uninitialized. A character holds five bits of
    a number, the least significant first, and whether more follow; from the fourth on, a number is the difference from
    the last but one.
    """
    runs: list[int] = []
    value = bits = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or bits > 60:
            return [-1]
        value |= (code & 31) << bits
        bits += 5
        if code & 32:
            continue
        value -= (1 << bits) if code & 16 else 0
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = bits = 0
    return [-1] if bits else runs


def _covers_no_pixel(annotation: Record, height: int, width: int) -> bool:
    """Whether valid polygons cover the middle of no pixel; an RLE that covers none is not valid."""
    parts = without_slivers(annotation)["segmentation"]
    return isinstance(parts, list) and not coco_mask.area(encode_segmentation(parts, height, width))


def _meets(coordinates: Sequence[float], side: int) -> bool:
    return max(coordinates) > 0 and min(coordinates) < side


def _is_near(coordinates: Sequence[float], side: int) -> bool:
    """Whether no coordinate is further outside the image than the image is large.

    pycocotools clips coordinates near the image, but ends the process if one is very far away.
    """
    return min(coordinates) >= -side and max(coordinates) <= 2 * side


def _fingerprint(file: Path, folder: Path, content: Record) -> str:
    """Raises UserError for an image that is missing."""
    digest = hashlib.sha256(f"{_CHECK_VERSION}\0{folder.resolve()}\0".encode())
    digest.update(file.read_bytes())
    for image in content["images"]:
        path = folder / image["file_name"]
        try:
            state = path.stat()
        except OSError as error:
            raise UserError(f"data: {file}: image {image['id']}: {path} is missing ({error.strerror})") from None
        digest.update(f"{state.st_size} {state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _is_integer(value: Any) -> bool:
    """Whether the value is an integer that a tensor can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
