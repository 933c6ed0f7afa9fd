"""COCO data: images and their objects as samples, each a function of the seed, the epoch and its index.

A data set is named ``coco:PATH``. It has COCO's own layout (``annotations/instances_train2017.json`` and
``train2017/``) or a flat one (``instances_train.json`` and ``images/``), with a val split and optionally a test split.
The val split is evaluated unless an ``@`` names another one: ``coco:PATH@test``.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert

from ...engine.randomness import data_order, seed_sample
from ...errors import UserError, nearest
from ...files.reading import require_data_folder
from ...output.terminal import counted
from ...settings.config import DetectionAugment
from ..images import UnreadableImage, open_image
from ..splits import check_holdout, hold_out, sources_of, split_of
from .transforms import Target, augmented, clamped
from .validate import Checked, Record, check_split, encode_segmentation, read_annotations, without_slivers

__all__ = [
    "CocoData",
    "CocoSplit",
    "DetectionSamples",
    "LeftOut",
    "corners_of",
    "grouped_order",
    "load_coco",
    "other_category",
    "read_pixels",
]

WithoutObjects = Literal["refuse", "leave_out", "train"]

_JSON = ("annotations/instances_{}2017.json", "annotations/instances_{}.json", "instances_{}.json")
_FOLDERS = ("{}2017", "images/{}", "{}", "images")
_GROUP_SIZE = 4  # images of one shape in a row, at most


@dataclass(frozen=True)
class LeftOut:
    """Records of a file that are left out, or cut to the image."""

    file: str  # its name
    what: str  # "annotations" or "images"
    count: int
    total: int
    first: str  # the first of them, and why
    done: str = "left out"

    def __str__(self) -> str:
        return f"{self.done}: {self.count} of {self.total} {self.what} of {self.file}, such as {self.first}"


@dataclass(frozen=True)
class CocoSplit:
    file: Path
    folder: Path  # of the images
    categories: tuple[Record, ...]  # by id; label 1 is the first category's
    images: tuple[Record, ...]
    annotations: dict[int, list[Record]]  # of each image, by the image's id
    has_masks: bool  # whether the annotations' masks are used
    left_out: tuple[LeftOut, ...]
    stored: frozenset[int]  # ids of the images that are read as stored, not turned upright by EXIF
    notices: tuple[str, ...]  # what else the user should know

    def read(self, image: Record) -> Tensor:
        """Read an image's pixels, oriented as its annotations are, by :func:`read_pixels`."""
        return read_pixels(self.folder / image["file_name"], image["id"] in self.stored)

    @property
    def labels(self) -> dict[int, int]:
        """The label of each category id."""
        return {category["id"]: label for label, category in enumerate(self.categories, 1)}

    def content(self) -> dict[str, Any]:
        """The split in the form that COCO's evaluation takes, without what is left out.

        Annotations are renumbered from 1: pycocotools takes an id of 0 for "no match", and would count a correct
        detection as a wrong one.
        """
        records = [record for image in self.images for record in self.annotations.get(image["id"], [])]
        annotations = [{"iscrowd": 0, **record, "id": number} for number, record in enumerate(records, 1)]
        return {"images": list(self.images), "annotations": annotations, "categories": list(self.categories)}

    def objects_of(self, image: Record) -> list[Record]:
        """The annotations of an image, without crowds."""
        return [record for record in self.annotations.get(image["id"], []) if not record.get("iscrowd", 0)]


@dataclass(frozen=True)
class CocoData:
    classes: tuple[str, ...]
    train: CocoSplit
    val: CocoSplit  # the one that is evaluated
    evaluated: str  # the name of the split that ``val`` holds


class DetectionSamples(Dataset):
    """Images with their objects: sample (epoch, index) is a function of these numbers and the seed.

    A sample is the image (3, H, W) with values in 0 … 1 and its target ("boxes" (N, 4) as x1, y1, x2, y2 in pixels,
    "labels" (N) counted from 1, and, if the split has masks, "masks" (N, H, W) of 0 and 1). Crowd regions are not in
    the target. Without ``with_targets``, and then without augmentation too, targets are empty: decoding all masks of an
    image at its full size takes long.
    """

    def __init__(
        self, split: CocoSplit, augment: DetectionAugment | None = None, seed: int = 0, *, with_targets: bool = True
    ):
        self.split, self.augment, self.seed, self.with_targets = split, augment, seed, with_targets
        self.labels = split.labels

    def __len__(self) -> int:
        return len(self.split.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Target]:
        """Raises UserError for an image that cannot be decoded because its file has changed since the check."""
        epoch, index = key
        record = self.split.images[index]
        try:
            image = self.split.read(record)
        except UnreadableImage as error:
            raise UserError(f"data: cannot decode {self.split.folder / record['file_name']}: {error}") from None
        target = self.target(index) if self.with_targets else {}
        if self.augment:
            seed_sample(self.seed, epoch, index)
            image, target = augmented(image, target, self.augment)
        return image, target

    def target(self, index: int) -> Target:
        """The objects of an image, at the size of the image."""
        record = self.split.images[index]
        height, width = record["height"], record["width"]
        objects = self.split.objects_of(record)
        boxes = corners_of(objects)
        labels = torch.tensor([self.labels[a["category_id"]] for a in objects], dtype=torch.int64)
        target = {"boxes": clamped(boxes, height, width), "labels": labels}
        if self.split.has_masks:
            target["masks"] = _masks_of(objects, height, width)
        return target


def corners_of(records: Sequence[Record]) -> Tensor:
    """The boxes of COCO's records, (N, 4) as x1, y1, x2, y2."""
    boxes = torch.tensor([record["bbox"] for record in records], dtype=torch.float32).reshape(-1, 4)
    return box_convert(boxes, "xywh", "xyxy")


def load_coco(
    data: str,
    *,
    masks: bool = True,
    max_invalid: int = 0,
    without_objects: WithoutObjects = "refuse",
    holdout: int | None = None,
    training: bool = True,
    with_test: bool = False,
) -> CocoData:
    """Open a data set and check all of it.

    Args:
        data: ``coco:PATH``, or just the path; an ``@`` may name the split to evaluate.
        masks: whether masks are needed. If not, boxes are enough, and masks are not read.
        max_invalid: how many annotations per split may be left out (a box without area or outside its image, a mask
            that is missing or wrong) or cut to the image (a box that extends beyond it).
        without_objects: what to do with training images that have no objects except crowds.
        holdout: number of training images to validate on; the data's own val split then becomes test.
        training: False opens only the evaluated split, and leaves the training split without images.
        with_test: also check the test split, which is scored once training has ended.

    Raises:
        UserError: there is a mistake in the data; the message names the file and the record.
    """
    data, evaluated = split_of(data)
    root = _root_of(data)
    scored = [evaluated, *["test"] * with_test]
    for name in scored:
        _check_splits(root, name, holdout)
    sources = sources_of(holdout)
    needed = [*["train"] * training, *scored]
    files = {name: _open_split(root, name, max_invalid, masks) for name in dict.fromkeys(sources[n] for n in needed)}
    first, *others = files.values()
    for other in others:
        if differs := other_category(other.categories, first.categories):
            raise UserError(f"data: {other.file} {differs} as in {first.file}")

    def part(name: str) -> CocoSplit:
        split = files[sources[name]]
        if holdout is not None and sources[name] == "train":
            indices = hold_out(holdout, len(split.images))[0 if name == "train" else 1]
            split = replace(split, images=tuple(split.images[index] for index in indices))
        return _with_objects(split, without_objects) if name == "train" else split

    for split in map(part, scored):
        if not any(map(split.objects_of, split.images)):
            got = f"got no objects to score in {len(split.images)} images"
            raise UserError(f"data: {split.file}: {got}, expected annotations besides crowds")
    val = _with_areas(part(evaluated))
    train = part("train") if training else replace(val, images=(), annotations={}, left_out=(), notices=())
    return CocoData(
        tuple(category["name"] for category in val.categories),
        train,
        val,
        f"{holdout} of train" if holdout and evaluated == "val" else evaluated,
    )


def other_category(categories: Sequence[Record], expected: Sequence[Record]) -> str:
    """Describe the first category whose id or name is not the expected one; "" if there is none."""
    ours, theirs = ([f"{one['id']} ({one['name']})" for one in some] for some in (categories, expected))
    for got, wanted in itertools.zip_longest(ours, theirs, fillvalue="no further one"):
        if got != wanted:
            return f"has other categories: got {got}, expected {wanted}"
    return ""


def read_pixels(file: Path | Image.Image, as_stored: bool = False) -> Tensor:
    """Read an image of any mode as (3, H, W) with values in 0 … 1. Takes files and raises errors as ``open_image``."""
    return torch.from_numpy(np.array(open_image(file, as_stored=as_stored))).permute(2, 0, 1).float() / 255


def grouped_order(samples: DetectionSamples, epoch: int, batch_size: int) -> list[int]:
    """The indices of an epoch, a function of (seed, epoch), with upright and wide images in groups of their own.

    There are whole batches only. The images that do not fill one are dropped before the others are grouped, so each
    epoch drops different ones, of either shape. The size of a group is the largest divisor of ``batch_size`` up to
    four, so that a forward pass of that many images pads none from one shape to the other. The groups are in random
    order; images that do not fill a group come last.
    """
    together = max(size for size in range(1, _GROUP_SIZE + 1) if batch_size % size == 0)
    order = data_order(samples.seed, epoch, len(samples)).tolist()[: len(samples) // batch_size * batch_size]
    upright = {index for index in order if _is_upright(samples.split.images[index])}
    groups, rest = [], []
    for shape in ([i for i in order if i in upright], [i for i in order if i not in upright]):
        full = len(shape) - len(shape) % together
        groups += [shape[first : first + together] for first in range(0, full, together)]
        rest += shape[full:]
    shuffled = [groups[index] for index in data_order(samples.seed + 1, epoch, len(groups))]
    return [index for group in shuffled for index in group] + rest


def _is_upright(image: Record) -> bool:
    return image["height"] > image["width"]


def _masks_of(objects: Sequence[Record], height: int, width: int) -> Tensor:
    """Decode the objects' masks to (N, H, W) of 0 and 1."""
    if not objects:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    encoded = [encode_segmentation(record["segmentation"], height, width) for record in objects]
    return torch.from_numpy(np.ascontiguousarray(coco_mask.decode(encoded).transpose(2, 0, 1)))


def _root_of(data: str) -> Path:
    kind, colon, path = data.partition(":")
    root = Path(path if colon and kind == "coco" else data)
    if colon and kind != "coco" and not root.exists():
        raise UserError(f"data: got {data!r}, expected coco:PATH{nearest(kind, ['coco'])}")
    require_data_folder(root, "--data coco:PATH, with images and their JSON")
    return root


def _check_splits(root: Path, evaluated: str, holdout: int | None) -> None:
    """Raises UserError if there is no test split to score, or if there is one and ``holdout`` is given."""
    has_test = any((root / pattern.format("test")).exists() for pattern in _JSON)
    check_holdout(holdout, root, has_test)
    if evaluated == "test" and not has_test and holdout is None:
        expected = " or ".join(pattern.format("test") for pattern in _JSON)
        raise UserError(
            f"data: {root} has no test split, expected {expected}, or a recipe with holdout, which validates on "
            "training images and leaves the val split for @test"
        )


def _open_split(root: Path, name: str, max_invalid: int, masks: bool) -> CocoSplit:
    file = _first_of(root, _JSON, name, "file of instances")
    folder = _first_of(root, _FOLDERS, name, "folder of images")
    content = read_annotations(file)
    checked = check_split(file, folder, content)
    total = len(content["annotations"])
    _check_annotations(file, checked, total, max_invalid, masks)
    unusable = {**checked.invalid, **(checked.wrong_masks if masks else {})}
    cut = {number: reason for number, reason in checked.reaching_out.items() if number not in unusable}
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    annotations: dict[int, list[Record]] = defaultdict(list)
    for annotation in content["annotations"]:
        if annotation["id"] in unusable:
            continue
        if annotation["id"] in cut:
            annotation = _cut(annotation, *sizes[annotation["image_id"]])
        if annotation["id"] in checked.wrong_masks:  # boxes alone are learnt
            annotation = {key: value for key, value in annotation.items() if key != "segmentation"}
        annotations[annotation["image_id"]].append(without_slivers(annotation))
    categories = sorted(content["categories"], key=lambda category: category["id"])
    left_out = tuple(
        LeftOut(file.name, "annotations", len(reasons), total, next(iter(reasons.values())), done)
        for done, reasons in (("left out", unusable), ("cut to the image", cut))
        if reasons
    )
    return CocoSplit(
        file,
        folder,
        tuple(categories),
        tuple(content["images"]),
        dict(annotations),
        masks,
        left_out,
        frozenset(checked.stored),
        (*checked.notices, *(_on_empty_masks(file, checked.empty_masks, total) if masks else ())),
    )


def _on_empty_masks(file: Path, empty: Sequence[str], total: int) -> list[str]:
    if not empty:
        return []
    objects = f"{len(empty):,} of {counted(total, 'annotation')} of {file.name} have polygons that cover no pixel"
    return [f"{objects}, such as {empty[0]}: their masks are empty, and no prediction can match them"]


def _check_annotations(file: Path, checked: Checked, total: int, max_invalid: int, masks: bool) -> None:
    """Raises UserError if more than ``max_invalid`` annotations cannot be used as they are."""
    wrong_masks = checked.wrong_masks if masks else {}
    boxes_alone = "model.name=faster_rcnn or cascade_rcnn (and baseline.name)"
    if masks and total > len(checked.invalid) and checked.without_mask == total - len(checked.invalid):
        raise UserError(f"data: {file} has boxes and no segmentations, expected {boxes_alone}, which learn boxes alone")
    count = len({*checked.invalid, *checked.reaching_out, *wrong_masks})
    if count <= max_invalid:
        return
    boxes = {**checked.invalid, **checked.reaching_out}
    first = next(iter({**boxes, **wrong_masks}.values()))
    ways = [
        *["leave out those that cannot be used"] * bool(checked.invalid or wrong_masks),
        *["cut boxes to their images"] * bool(checked.reaching_out),
    ]
    advice = "" if boxes else f"; to train without masks, set {boxes_alone}"
    mends = f"set max_invalid={count} to {' and '.join(ways)}"
    raise UserError(f"data: {file}: {first} ({count} of {total} annotations; {mends}){advice}")


def _cut(annotation: Record, height: int, width: int) -> Record:
    """The annotation with its box cut to the image; an area that it gives stays the same."""
    x, y, wide, high = annotation["bbox"]
    left, top = max(x, 0), max(y, 0)
    box = [left, top, min(x + wide, width) - left, min(y + high, height) - top]
    return {**annotation, "bbox": box}


def _first_of(root: Path, patterns: Sequence[str], name: str, what: str) -> Path:
    paths = [root / pattern.format(name) for pattern in patterns]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        expected = " or ".join(str(path.relative_to(root)) for path in paths)
        raise UserError(f"data: {root} has no {what} of {name}, expected {expected}")
    return found


def _with_objects(split: CocoSplit, without: WithoutObjects) -> CocoSplit:
    """A training split, with images that have no objects treated as ``without`` says."""
    empty = [image for image in split.images if not split.objects_of(image)]
    if not empty or without == "train":
        return split
    first, total = f"{empty[0]['file_name']} (id {empty[0]['id']})", len(split.images)
    if without == "refuse":
        raise UserError(
            f"data: {split.file}: {len(empty)} of {total} images have no objects to train on, such as {first}; "
            "set without_objects=leave_out, or without_objects=train to learn that there is nothing in them"
        )
    kept = tuple(image for image in split.images if split.objects_of(image))
    if not kept:
        raise UserError(f"data: {split.file} has no image with objects to train on, expected at least one")
    left_out = LeftOut(split.file.name, "images", len(empty), total, f"{first}, which has no objects")
    return replace(split, images=kept, left_out=(*split.left_out, left_out))


def _with_areas(split: CocoSplit) -> CocoSplit:
    """A split to evaluate, with the areas that its file leaves out, and a notice of how many these are.

    By its area an object counts as small, medium or large, in the AP of boxes too. It is that of the object's mask, as
    in COCO's own files, or that of its box if there is no mask that covers a pixel.
    """
    computed: Counter[str] = Counter()
    annotations = {image["id"]: split.annotations.get(image["id"], []) for image in split.images}

    def completed(record: Record, height: int, width: int) -> Record:
        if record.get("area") is not None:
            return record
        parts = record.get("segmentation")
        of_mask = float(coco_mask.area(encode_segmentation(parts, height, width))) if parts else 0.0
        computed["mask" if of_mask else "box"] += 1
        return {**record, "area": of_mask or record["bbox"][2] * record["bbox"][3]}

    for image in split.images:
        size = image["height"], image["width"]
        annotations[image["id"]] = [completed(record, *size) for record in annotations[image["id"]]]
    if not computed:
        return split
    total = counted(sum(map(len, annotations.values())), "annotation")
    lacking = f"{computed.total():,} of {total} of {split.file.name} have no area"
    sources = " and ".join(f"of the {kind} for {count:,}" for kind, count in sorted(computed.items(), reverse=True))
    told = f"{lacking}, which the AP by size goes by: it is that {sources}"
    return replace(split, annotations=annotations, notices=(*split.notices, told))
