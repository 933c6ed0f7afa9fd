"""Semantic segmentation: augmented crops, cross-entropy with an auxiliary head's, and mIoU on whole pictures."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision import tv_tensors
from torchvision.transforms import v2

from ...analysis.complexity import Complexity, count_complexity
from ...config import SegmentationRecipe
from ...engine.distributed import sync_batch_norms
from ...engine.randomness import data_order, seed_sample
from ...engine.task import BatchShard, Task
from ...errors import UserError
from ...files import write_atomically
from ...models.backbone import load_backbone, normalisation_of
from ...models.build import build_model
from ...models.upernet import UPerNet
from ..loading import loaded
from .data import IGNORED, SegmentationData, Split, load_pairs
from .inference import Inference
from .transforms import training_transform

__all__ = ["AUXILIARY_WEIGHT", "Segmentation", "classes_of", "commonest", "inference_of", "scores", "build"]

AUXILIARY_WEIGHT = 0.4  # of the auxiliary head's loss (facts.md)
_CLASSES = "classes.json"  # in a run's folder
_EXAMPLES = 8

Batch = tuple[Tensor, Tensor]  # images and labels


def build(
    recipe: SegmentationRecipe, data: str | None = None, run: Path | None = None
) -> tuple[nn.Module, Segmentation]:
    """Raises UserError for a model or data that are not there, or that do not fit each other."""
    model = build_model(recipe.model)
    if not isinstance(model, UPerNet):
        raise UserError(f"model: got {recipe.model.name!r}, expected upernet for {recipe.task}")
    place, _, split = (data or recipe.data).partition("@")  # DATA@test scores the test split
    pairs = load_pairs(place, only=(split or "val") if run else None)
    if split and split not in pairs.splits:
        raise UserError(f"data: {place} has no split {split!r}, expected one of {', '.join(pairs.splits)}")
    if model.num_classes != len(pairs.classes):
        raise UserError(f"model.args.num_classes: got {model.num_classes}, expected the data's {len(pairs.classes)}")
    # ADE20K has one order of classes, with the file of their names or without
    if run and not place.startswith("ade20k:") and classes_of(run) != list(pairs.classes):
        raise UserError(f"data: {place} has other classes than {run} was trained on")
    inference = inference_of(recipe, model)
    transform = training_transform(recipe.augment, recipe.scale, recipe.crop_size, inference.mean, inference.std)
    task = Segmentation(
        pairs,
        recipe.batch_size,
        transform,
        inference,
        crop_size=recipe.crop_size,
        backbone=recipe.backbone,
        seed=recipe.seed,
        epoch_updates=recipe.epoch_updates,
        evaluated=split or "val",
        workers=recipe.workers,
    )
    sync_batch_norms(model.decode_head, model.auxiliary_head, device=recipe.device)
    return model, task


def classes_of(run: Path) -> list[str]:
    """Raises UserError where a run's folder does not name its classes."""
    try:
        return json.loads((run / _CLASSES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"run: cannot read {run / _CLASSES}: {' '.join(str(error).split())}") from None


def inference_of(recipe: SegmentationRecipe, model: UPerNet) -> Inference:
    """How the recipe tests whole pictures, with the mean and deviation that timm has for the backbone."""
    return Inference(
        *normalisation_of(model.backbone_name),
        recipe.scale,
        recipe.eval_window,
        recipe.eval_stride,
        recipe.eval_scales,
        recipe.eval_flip,
    )


class Segmentation(Task):
    """The task: crops of all training pictures, pass after pass, each in an order of (seed, pass)."""

    monitor = "miou"
    unit, units_per_sample = "images", 1

    def __init__(
        self,
        data: SegmentationData,
        batch_size: int,
        transform: v2.Transform,
        inference: Inference,
        *,
        crop_size: int = 512,
        backbone: str | None = None,
        seed: int = 0,
        epoch_updates: int | None = None,
        evaluated: str = "val",
        workers: int = 0,
    ):
        """
        Args:
            batch_size: crops per update, over all ranks and accumulated parts.
            crop_size: side of the training crops in pixels.
            backbone: the run or file whose weights a new model starts from.
            transform: a training picture and its labels -> what the model sees.
            inference: how the pictures of the split ``evaluated`` are tested.
            epoch_updates: updates between evaluations, of however many passes; None is one pass.
            workers: processes a rank that decode and augment; the batches are the same with any number.

        Raises:
            UserError: there are fewer training pictures than ``batch_size``, and no ``epoch_updates``.
        """
        self.crop_size, self.backbone = crop_size, backbone
        self.samples, self.inference = _Crops(data, transform, seed), inference
        count = len(self.samples)  # 0 where data are opened for scoring alone
        if epoch_updates is None and 0 < count < batch_size:
            raise UserError(f"batch_size: got {batch_size}, expected 1 to the {count} training images")
        self.data, self.batch_size, self.seed, self.workers = data, batch_size, seed, workers
        self.evaluated, self.split = evaluated, data.splits[evaluated]
        self.steps_per_epoch = epoch_updates or count // batch_size
        self.class_iou: dict[str, float | None] = {}  # of the last evaluation
        self.commonest: dict[str, Any] = {}
        self.untold = [f"no pixel of {name} is labelled" for name in data.unlabelled]

    def place_of(self, number: int) -> tuple[int, int]:
        """(pass, index) of the ``number``-th crop of the run; a pass has every picture once, and none is left out."""
        turn, position = divmod(number, len(self.samples))
        return turn, int(_order_of_pass(self.seed, turn, len(self.samples))[position])

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Batch]:
        """Pictures (b, 3, crop, crop) and labels (b, crop, crop)."""
        size = shard.micro_batch_size(self.batch_size)
        if size * (shard.world_size if device.type == "cuda" else 1) < 2:
            raise UserError(f"batch_size: got {size} images a forward pass, expected at least 2 for batch norm")
        updates = range(epoch * self.steps_per_epoch + start, (epoch + 1) * self.steps_per_epoch)
        chosen = [
            [self.place_of(number) for number in numbers]
            for update in updates
            for numbers in shard.micro_batches(update, self.batch_size)
        ]
        with loaded(self.samples, device, self.workers, len(chosen), batch_sampler=chosen) as batches:
            for images, labels in batches:
                yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True).long()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        found = model(images)
        logits, *auxiliary = found if isinstance(found, tuple) else (found,)  # (b, classes, crop, crop) each
        loss = _cross_entropy(logits, labels)
        for others in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * _cross_entropy(others, labels)
        counted = labels != IGNORED
        right = ((logits.argmax(1) == labels) & counted).sum() / counted.sum().clamp(min=1)
        return loss, {"pixel_accuracy": 100 * right}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: BatchShard, device: torch.device) -> dict[str, float]:
        """Cross-entropy and :func:`scores` of whole pictures, at the size of each."""
        classes, sizes, world = len(self.data.classes), self.split.sizes, shard.world_size
        confusion = MulticlassConfusionMatrix(classes, ignore_index=IGNORED, validate_args=False).to(device)
        mean_loss = MeanMetric().to(device)
        rounds = -(-len(sizes) // world)
        positions = [turn * world + shard.rank for turn in range(rounds)]
        pictures = _Pictures(self.data, self.split)
        chosen = [position if position < len(sizes) else 0 for position in positions]
        with loaded(pictures, device, self.workers, rounds, sampler=chosen, batch_size=None) as every:
            for turn, (position, (picture, labels)) in enumerate(zip(positions, every)):
                picture, labels = picture.to(device, non_blocking=True), labels.to(device, non_blocking=True).long()
                found = self.inference(model, picture)  # (classes, H, W)
                for _ in range(self._passes_left(turn, position, world)):
                    model(torch.zeros_like(picture, dtype=torch.float32)[None, :, :32, :32])
                if position < len(sizes):
                    confusion.update(found.argmax(0)[None], labels[None])
                    counted = (labels != IGNORED).sum()
                    loss = F.nll_loss(found[None], labels[None], ignore_index=IGNORED, reduction="sum")
                    mean_loss.update(loss / counted.clamp(min=1), counted)
        pixels = confusion.compute().cpu()
        result, of_class = scores(pixels)
        self.class_iou = dict(zip(self.data.classes, of_class))
        self.commonest = commonest(pixels, self.data.classes)
        return {"loss": mean_loss.compute().item(), **result}

    def example_batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first pictures of the evaluated split, squeezed to squares of the crops' size."""
        found, side = [], self.crop_size
        for pair in self.split.pairs[:_EXAMPLES]:
            picture, labels = _tensors(*self.data.read(pair))
            squeeze = v2.Compose(
                [
                    v2.Resize((side, side)),
                    v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                    v2.Normalize(list(self.inference.mean), list(self.inference.std)),
                ]
            )
            found.append(squeeze(picture, labels))
        images, labels = zip(*found)
        return torch.stack(images).to(device), torch.stack(labels).to(device).long()

    def load_pretrained(self, model: nn.Module) -> None:
        if self.backbone:
            load_backbone(cast(UPerNet, model).backbone, self.backbone)

    def complexity(self, model: nn.Module) -> Complexity:
        return count_complexity(model, input_size=(3, self.crop_size, self.crop_size))

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """The names of the classes, so that a run can be used where its data are not."""
        write_atomically(folder / _CLASSES, json.dumps(self.data.classes, indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        images = {name: len(split.pairs) for name, split in self.data.splits.items()}
        return {
            "images": images,
            "unlabelled": len(self.data.unlabelled),
            "class_iou": self.class_iou,
            "commonest_class": self.commonest,
        }

    def notices(self) -> list[str]:
        told, self.untold = self.untold, []
        return told

    def _passes_left(self, turn: int, position: int, world: int) -> int:
        """Every rank runs the model equally often, as FSDP asks: how often more after this picture."""
        if world == 1 or self.inference.window is None:
            return 0
        sizes = self.split.sizes
        of_round = [sizes[n] if n < len(sizes) else sizes[0] for n in range(turn * world, (turn + 1) * world)]
        return max(map(self.inference.passes, of_round)) - self.inference.passes(of_round[position % world])


def scores(confusion: Tensor) -> tuple[dict[str, float], list[float | None]]:
    """mIoU, mAcc and pixel accuracy in %, and the IoU of each class, from pixels (true class, predicted class).

    A class that is neither in the annotations nor predicted has no IoU, and one that is not in the annotations no
    accuracy: means are over the others.
    """
    pixels = confusion.double()
    right, true, predicted = pixels.diagonal(), pixels.sum(1), pixels.sum(0)
    iou = 100 * right / (true + predicted - right)  # 0/0 is nan
    accuracy = 100 * right / true
    means = {"miou": iou.nanmean(), "macc": accuracy.nanmean(), "pixel_accuracy": 100 * right.sum() / pixels.sum()}
    of_class = [None if value != value else round(value, 4) for value in iou.tolist()]
    return {name: round(value.item(), 4) for name, value in means.items()}, of_class


def commonest(confusion: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """What is to be beaten: the class of most pixels, and :func:`scores` if every pixel were given to it."""
    true = confusion.sum(1)
    everywhere = torch.zeros_like(confusion)
    everywhere[:, true.argmax()] = true
    return {"name": classes[int(true.argmax())], **scores(everywhere)[0]}


class _Crops(Dataset):
    """Training's samples: (pass, index) and the seed say all."""

    def __init__(self, data: SegmentationData, transform: v2.Transform, seed: int):
        self.data, self.transform, self.seed = data, transform, seed
        self.pairs = data.splits["train"].pairs if "train" in data.splits else ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        turn, index = place
        picture, labels = _tensors(*self.data.read(self.pairs[index]))
        seed_sample(self.seed, turn, index)
        image, target = self.transform(picture, labels)
        return image.as_subclass(Tensor), target.as_subclass(Tensor)


class _Pictures(Dataset):
    """Whole pictures (3, H, W) and labels (H, W), both uint8."""

    def __init__(self, data: SegmentationData, split: Split):
        self.data, self.pairs = data, split.pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, labels = _tensors(*self.data.read(self.pairs[index]))
        return picture.as_subclass(Tensor), labels.as_subclass(Tensor)


def _tensors(picture: Any, labels: np.ndarray) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
    return tv_tensors.Image(v2.functional.pil_to_tensor(picture)), tv_tensors.Mask(torch.from_numpy(labels))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled pixels; 0 where there is none."""
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


@lru_cache(maxsize=2)
def _order_of_pass(seed: int, turn: int, count: int) -> np.ndarray:
    return data_order(seed, turn, count)
