"""Object detection and instance segmentation: batches of images of many sizes, a detector's losses, COCO's AP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...analysis.complexity import Complexity, count_detector
from ...engine.distributed import sync_batch_norms, unwrap
from ...engine.task import BatchShard, Task
from ...errors import UserError
from ...files.reading import read_json
from ...files.writing import write_atomically
from ...models.backbone import load_backbone
from ...models.build import DETECTORS, build_model
from ...models.mask_rcnn import Detector
from ...output.terminal import counted
from ...run_folder.folder import asset
from ...run_folder.inspection import Section
from ...settings.config import DetectionAugment, DetectionRecipe
from ...settings.from_data import check_class_count, key_of_model, key_of_weights, with_classes
from ..loading import loaded
from ..normalization import Normalization, on_weights
from ..pictures import spread_over
from ..remarks import on_classes
from .data import CocoData, CocoSplit, DetectionSamples, LeftOut, grouped_order, load_coco, other_category
from .inspection import pictures_of
from .scores import ByClass, average_precision, found_objects, objects_by_class
from .transforms import Target, resized_size
from .validate import Record

__all__ = ["CATEGORIES_FILE", "Detection", "build", "open_data", "read_categories", "resolve"]

CATEGORIES_FILE = "categories.json"  # in a run's folder, so that the run can be used without its data
_EXAMPLES = 2
_ASPECT = 1.6  # width over height of the image for which MACs are counted, as in COCO's 1280×800

Batch = tuple[list[Tensor], list[Target]]


def open_data(recipe: DetectionRecipe, data: str, run: Path | None = None) -> CocoData:
    """Raises UserError if the data do not exist or contain a mistake, or if the model is not a detector."""
    if recipe.model.name not in DETECTORS:
        raise UserError(f"model: got {recipe.model.name}, expected one of {', '.join(DETECTORS)} for detection")
    return load_coco(
        data,
        masks=DETECTORS[recipe.model.name],
        max_invalid=recipe.max_invalid,
        without_objects=recipe.without_objects,
        holdout=recipe.holdout,
        training=run is None,
        with_test=recipe.score_test and run is None,
    )


def resolve(recipe: DetectionRecipe, opened: CocoData) -> tuple[DetectionRecipe, list[str]]:
    """The recipe with its number of classes taken from the data, if it leaves that open, and a line that says so."""
    return with_classes(recipe, len(opened.classes))


def build(
    recipe: DetectionRecipe, data: str | None = None, run: Path | None = None, opened: CocoData | None = None
) -> tuple[nn.Module, Detection]:
    """Raises UserError if the model or the data do not exist, or if they do not fit each other."""
    coco = opened or open_data(recipe, data or recipe.data, run)
    model = cast(Detector, build_model(recipe.model, pretrained=run is None))
    task = Detection(recipe, coco, model)
    if run:
        read_categories(run)  # without them nothing says whether the classes are the run's
        task.check_assets(run)
    check_class_count(recipe, model.num_classes, len(coco.classes), run)
    sync_batch_norms(model.roi_heads, device=recipe.device)
    return model, task


def _with_sizes(augment: DetectionAugment | None, as_evaluated: DetectionAugment) -> DetectionAugment:
    """The recipe's augmentation, with the sizes of evaluation if it names none."""
    augment = augment or as_evaluated
    sizes, max_size = augment.sizes or as_evaluated.sizes, augment.max_size or as_evaluated.max_size
    return replace(augment, sizes=sizes, max_size=max_size)


def _augment_as_evaluated(model: Detector) -> DetectionAugment:
    size, max_size = model.transform.min_size[-1], model.transform.max_size
    return DetectionAugment(sizes=(size,), max_size=max_size)


class Detection(Task):
    """The detection task.

    Each epoch visits the training images grouped by shape, in an order that depends on (seed, epoch).
    """

    monitor = "box_ap"
    unit, units_per_sample = "images", 1

    def __init__(self, recipe: DetectionRecipe, data: CocoData, model: Detector):
        """Raises UserError if there are training images, but fewer than ``recipe.batch_size``."""
        count = len(data.train.images)  # 0 if the data were opened for evaluation only
        if 0 < count < recipe.batch_size:
            raise UserError(
                f"batch_size: got {recipe.batch_size}, expected 1 to {count}, the number of training images"
            )
        self.recipe, self.data, self.batch_size = recipe, data, recipe.batch_size
        as_evaluated = _augment_as_evaluated(model)
        self.train = DetectionSamples(data.train, _with_sizes(recipe.augment, as_evaluated), recipe.seed)
        self.val = DetectionSamples(data.val, with_targets=False)  # the scores take the annotations themselves
        self.examples = DetectionSamples(data.val, as_evaluated)
        self.by_class: ByClass = {}  # of the last evaluation
        self.steps_per_epoch = count // recipe.batch_size  # the last, smaller batch is dropped
        told = (line for split in (data.train, data.val) for line in split.notices)
        self.new_notices = [*map(str, self._left_out()), *dict.fromkeys(told)]

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Batch]:
        order = grouped_order(self.train, epoch, self.batch_size)
        keys = [
            [(epoch, order[position]) for position in positions]
            for update in range(start, self.steps_per_epoch)
            for positions in shard.micro_batches(update, self.batch_size)
        ]
        with self._loaded(self.train, keys, device) as batches:
            yield from batches

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the detector's losses, and each of them for the log.

        Raises:
            UserError: the batch is one image, so small that a batch norm of the backbone sees a single pixel of it.
        """
        images, targets = batch
        try:
            with _returning_losses(cast(Detector, unwrap(model))):
                losses = model(images, targets)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            got = "got a forward pass of one image, whose smallest feature map is one pixel"
            expected = "expected more or larger images, or a backbone with frozen_norms"
            raise UserError(f"batch_size: {got}, too little to train a batch norm; {expected}") from error
        return torch.stack(list(losses.values())).sum(), {name.removeprefix("loss_"): v for name, v in losses.items()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: BatchShard, device: torch.device) -> dict[str, float]:
        """COCO's AP of boxes, and of masks if there are any, in percent (see :func:`average_precision`)."""
        split, found = self.data.val, list[dict[str, Any]]()
        batches = shard.evaluation_batches(len(self.val), 1)  # one image at a time, at its own size
        keys = [[(0, index) for index in batch.indices] for batch in batches]
        with self._loaded(self.val, keys, device) as loaded_batches:
            for batch, (images, _) in zip(batches, loaded_batches):
                (objects,) = model(images)
                if not batch.is_padding:
                    image = {"image_id": split.images[batch.indices[0]]["id"]}
                    found += [{**image, **record} for record in found_objects(objects, list(split.labels))]
        scores, self.by_class = self._scored(found, shard)
        return scores

    def _scored(self, found: list[dict[str, Any]], shard: BatchShard) -> tuple[dict[str, float], ByClass]:
        """The AP of what all ranks have found, computed on rank 0."""
        records = [record for of_rank in shard.gather(found) for record in of_rank]
        scores = average_precision(self.data.val, records) if shard.rank == 0 else None
        return cast(Any, shard.gather(scores)[0])

    def example_batch(self, device: torch.device) -> Batch:
        count = min(_EXAMPLES, len(self.examples))
        images, targets = _collate([self.examples[0, index] for index in range(count)])
        moved = [{key: value.to(device) for key, value in target.items()} for target in targets]
        return [image.to(device) for image in images], moved

    def load_pretrained(self, model: nn.Module) -> list[str]:
        detector = cast(Detector, model)
        detector.backbone.body.check_frozen_norms()
        if source := self.recipe.backbone:
            key = key_of_weights(self.recipe, "backbone")
            load_backbone(detector.backbone.body, source, key)
            own = Normalization(tuple(detector.transform.image_mean), tuple(detector.transform.image_std))
            return on_weights(source, key, own)
        return []

    def remarks(self) -> list[str]:
        counts = [np.array([*objects_by_class(split).values()]) for split in (self.data.train, self.data.val)]
        return [*on_classes("objects", self.data.classes, *counts), *self._on_sizes()]

    def _on_sizes(self) -> list[str]:
        """A line if some images are evaluated at a size that training would not give them."""
        trained, evaluated = self.train.augment, self.examples.augment
        assert trained and trained.sizes and trained.max_size and evaluated and evaluated.sizes and evaluated.max_size
        size, least, largest = evaluated.sizes[0], min(trained.sizes), max(trained.sizes)
        outside = 0
        for image in self.data.val.images:
            shape = image["height"], image["width"]
            low, high = (min(resized_size(*shape, end, trained.max_size)) for end in (least, largest))
            side = min(resized_size(*shape, size, evaluated.max_size))
            outside += not low - 1 <= side <= high + 1  # a pixel is rounding
        if not outside:
            return []
        key, sizes = key_of_model(self.recipe), f"{least} to {largest}" if least < largest else str(least)
        return [
            f"evaluation gives {outside} of {counted(len(self.data.val.images), 'image')} a size that training would "
            f"not: {key}.args.size={size} and max_size={evaluated.max_size}, but augment.sizes={sizes} and "
            f"augment.max_size={trained.max_size}"
        ]

    def complexity(self, model: nn.Module) -> Complexity:
        size, max_size = cast(Detector, model).transform.min_size[-1], cast(Detector, model).transform.max_size
        return count_detector(model, input_size=(3, size, min(max_size, round(_ASPECT * size))))

    def check_assets(self, folder: Path) -> None:
        if asset(folder, CATEGORIES_FILE).exists():
            _check_categories(self.data.train, folder)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Write the categories, by which a detector's labels are read."""
        self.check_assets(folder)
        write_atomically(folder / CATEGORIES_FILE, json.dumps(self.data.train.categories) + "\n")

    def inspect(self, model: nn.Module, device: torch.device) -> list[Section]:
        """Some images, each with the objects that are there beside those that were found."""
        split, found = self.data.val, {}
        chosen = spread_over(len(split.images))
        with self._loaded(self.val, [[(0, index)] for index in chosen], device) as batches:
            for index, (images, _) in zip(chosen, batches):
                (objects,) = model(images)
                found[index] = found_objects(objects, list(split.labels))
        return pictures_of(split, found)

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "evaluated": len(self.val)}

    def facts(self) -> dict[str, Any]:
        return {
            "split": self.data.evaluated,
            "images": self.sizes(),
            "left_out": [dataclasses.asdict(left_out) for left_out in self._left_out()],
            "class_objects": objects_by_class(self.data.val),
            **{f"class_{metric}": of_class for metric, of_class in self.by_class.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"by_class": self.by_class}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_class = state.get("by_class", {})

    def notices(self) -> list[str]:
        notices, self.new_notices = self.new_notices, []
        return notices

    def _left_out(self) -> list[LeftOut]:
        return list(dict.fromkeys([*self.data.train.left_out, *self.data.val.left_out]))

    def _loaded(
        self, samples: DetectionSamples, keys: list[list[tuple[int, int]]], device: torch.device
    ) -> AbstractContextManager[Iterator[Batch]]:
        return loaded(samples, device, self.recipe.workers, len(keys), batch_sampler=keys, collate_fn=_collate)


def read_categories(run: Path) -> list[Record]:
    """The categories that a run was trained on. Raises UserError if their file is missing or broken."""
    return read_json(asset(run, CATEGORIES_FILE), "run", list)


@contextmanager
def _returning_losses(model: Detector) -> Iterator[None]:
    """Make the detector return losses, which it does in training mode only.

    Only the parts that decide this change their mode; the rest of the model, such as its norms, keeps it.
    """
    parts = [model, model.rpn, model.roi_heads, model.transform, *getattr(model.roi_heads, "stages", ())]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = True
    try:
        yield
    finally:
        for part, mode in zip(parts, modes):
            part.training = mode


def _check_categories(split: CocoSplit, run: Path) -> None:
    if differs := other_category(split.categories, read_categories(run)):
        raise UserError(f"data: {split.file} {differs} as in {run}")


def _collate(samples: Sequence[tuple[Tensor, Target]]) -> Batch:
    images, targets = zip(*samples)
    return list(images), list(targets)
