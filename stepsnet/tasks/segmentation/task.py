"""Semantic segmentation: augmented crops, cross-entropy with an auxiliary loss, and mIoU on complete images."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision import tv_tensors
from torchvision.transforms import v2

from ...analysis.complexity import Complexity, count_complexity
from ...engine.distributed import sync_batch_norms
from ...engine.randomness import sample_of_run, seed_sample
from ...engine.task import BatchShard, Task
from ...errors import UserError
from ...models.backbone import load_backbone, mean_and_std_of
from ...models.build import build_model
from ...models.upernet import UPerNet
from ...run_folder.folder import asset
from ...run_folder.inspection import Section
from ...settings.config import SegmentationRecipe
from ...settings.from_data import check_class_count, key_of_weights, with_classes
from ..class_names import CLASSES_FILE, check_classes, read_classes, save_classes
from ..loading import loaded
from ..normalization import Normalization, on_weights
from ..remarks import on_classes
from ..scoring import mean_loss, shared_by
from ..splits import require_split, split_of
from .data import IGNORED, SegmentationData, Split, load_pairs
from .inference import Inference
from .inspection import pictures_of
from .scores import most_common_class, scores
from .transforms import training_transform

__all__ = ["AUXILIARY_WEIGHT", "Segmentation", "build", "inference_of", "open_data", "resolve"]

AUXILIARY_WEIGHT = 0.4  # of the auxiliary head's loss, as in Swin's UPerNet
_EXAMPLES = 8
_IGNORED_SHARE = 0.25  # of the training images' pixels; a larger share is reported

Batch = tuple[Tensor, Tensor]  # images and labels


def open_data(recipe: SegmentationRecipe, data: str, run: Path | None = None) -> SegmentationData:
    """Raises UserError if the data do not exist or contain a mistake."""
    path, split = split_of(data)
    pairs = load_pairs(path, only=split if run else None, holdout=recipe.holdout)
    for needed in (split,) if run else ("train", split, *(["test"] if recipe.score_test else [])):
        require_split(path, needed, pairs.splits)
        if not any(pairs.splits[needed].class_pixels):
            raise UserError(f"data: {path}: got only ignored pixels in the {needed} split, expected some with a class")
    return pairs


def resolve(recipe: SegmentationRecipe, opened: SegmentationData) -> tuple[SegmentationRecipe, list[str]]:
    """The recipe with its number of classes taken from the data, if it leaves that open, and a line that says so."""
    return with_classes(recipe, len(opened.classes))


def build(
    recipe: SegmentationRecipe, data: str | None = None, run: Path | None = None, opened: SegmentationData | None = None
) -> tuple[nn.Module, Segmentation]:
    """Raises UserError if the model or the data do not exist, or if they do not fit each other."""
    model = build_model(recipe.model, pretrained=run is None)
    if not isinstance(model, UPerNet):
        raise UserError(f"model: got {recipe.model.name!r}, expected upernet for {recipe.task}")
    data = data or recipe.data
    task = Segmentation(recipe, opened or open_data(recipe, data, run), model, split_of(data)[1])
    if run:
        if not task.data.has_one_order:
            read_classes(run)  # without them nothing says whether the classes are the run's
        task.check_assets(run)
    check_class_count(recipe, model.num_classes, len(task.data.classes), run)
    sync_batch_norms(model.decode_head, model.auxiliary_head, device=recipe.device)
    return model, task


def inference_of(recipe: SegmentationRecipe, model: UPerNet) -> Inference:
    """How the recipe runs a model on images, with timm's mean and standard deviation for the backbone."""
    return Inference(
        *mean_and_std_of(model.backbone_name),
        recipe.scale,
        recipe.eval_window,
        recipe.eval_stride,
        recipe.eval_scales,
        recipe.eval_flip,
    )


class Segmentation(Task):
    """The segmentation task.

    It trains on crops of the training images, pass after pass, each in an order that depends on (seed, pass).
    """

    monitor = "miou"
    unit, units_per_sample = "images", 1

    def __init__(self, recipe: SegmentationRecipe, data: SegmentationData, model: UPerNet, evaluated: str):
        """
        Args:
            evaluated: the split to evaluate.

        Raises:
            UserError: there are training images, but fewer than ``recipe.batch_size``, and ``recipe.epoch_updates`` is
                not set.
        """
        self.recipe, self.data, self.batch_size = recipe, data, recipe.batch_size
        self.inference = inference = inference_of(recipe, model)
        transform = training_transform(recipe.augment, recipe.scale, recipe.crop_size, inference.mean, inference.std)
        self.samples = _Crops(data, transform, recipe.seed)
        count = len(self.samples)  # 0 if the data were opened for evaluation only
        if recipe.epoch_updates is None and 0 < count < recipe.batch_size:
            raise UserError(
                f"batch_size: got {recipe.batch_size}, expected 1 to {count}, the number of training images"
            )
        self.evaluated, self.split = evaluated, data.splits[evaluated]
        self.steps_per_epoch = recipe.epoch_updates or count // recipe.batch_size
        self.class_iou: dict[str, float | None] = {}  # of the last evaluation
        self.most_common: dict[str, Any] = {}
        self.new_notices = [*data.notices, *(f"no pixel of {name} is labelled" for name in data.unlabelled)]

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Batch]:
        """Images (b, 3, crop_size, crop_size) and labels (b, crop_size, crop_size)."""
        size = shard.micro_batch_size(self.batch_size)
        if size * (shard.world_size if device.type == "cuda" else 1) < 2:
            raise UserError(f"batch_size: got {size} per forward pass, expected at least 2 images for batch norm")
        updates = range(epoch * self.steps_per_epoch + start, (epoch + 1) * self.steps_per_epoch)
        keys = [
            [sample_of_run(self.recipe.seed, number, len(self.samples)) for number in numbers]
            for update in updates
            for numbers in shard.micro_batches(update, self.batch_size)
        ]
        with loaded(self.samples, device, self.recipe.workers, len(keys), batch_sampler=keys) as batches:
            for images, labels in batches:
                yield images, labels.long()

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
        """Cross-entropy and :func:`scores` on complete images, each at its own size."""
        classes, sizes = len(self.data.classes), self.split.sizes
        shared = shared_by(shard)
        confusion = MulticlassConfusionMatrix(classes, ignore_index=IGNORED, validate_args=False, **shared).to(device)
        loss_of_images = mean_loss(shard).to(device)
        batches = shard.evaluation_batches(len(sizes), 1)  # one image at a time, at its own size
        keys = [batch.indices[0] for batch in batches]
        settings = {"sampler": keys, "batch_size": None}
        with loaded(_Images(self.data, self.split), device, self.recipe.workers, len(keys), **settings) as images:
            for batch, passes, (image, labels) in zip(batches, self._passes_of_rounds(shard), images):
                found, labels = self.inference(model, image), labels.long()  # (classes, H, W), (H, W)
                for _ in range(passes - self.inference.passes(labels.shape)):
                    model(torch.zeros_like(image, dtype=torch.float32)[None, :, :32, :32])
                if batch.is_padding:
                    continue
                confusion.update(found.argmax(0)[None], labels[None])
                counted = (labels != IGNORED).sum()
                loss = F.nll_loss(found[None], labels[None], ignore_index=IGNORED, reduction="sum")
                loss_of_images.update(loss / counted.clamp(min=1), counted)
        pixels = confusion.compute().cpu()
        result, of_class = scores(pixels)
        self.class_iou = dict(zip(self.data.classes, of_class))
        self.most_common = most_common_class(pixels, self.data.classes)
        return {"loss": loss_of_images.compute().item(), **result}

    def example_batch(self, device: torch.device) -> Batch:
        """The first images of the evaluated split, resized to squares of ``crop_size``."""
        found, side = [], self.recipe.crop_size
        for pair in self.split.pairs[:_EXAMPLES]:
            image, labels = _tensors(*self.data.read(pair))
            squeeze = v2.Compose(
                [
                    v2.Resize((side, side)),
                    v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                    v2.Normalize(list(self.inference.mean), list(self.inference.std)),
                ]
            )
            found.append(squeeze(image, labels))
        images, labels = zip(*found)
        return torch.stack(images).to(device), torch.stack(labels).to(device).long()

    def load_pretrained(self, model: nn.Module) -> list[str]:
        backbone = cast(UPerNet, model).backbone
        backbone.check_frozen_norms()
        if source := self.recipe.backbone:
            key = key_of_weights(self.recipe, "backbone")
            load_backbone(backbone, source, key)
            own = Normalization(tuple(self.inference.mean), tuple(self.inference.std))
            return on_weights(source, key, own)
        return []

    def remarks(self) -> list[str]:
        train = self.data.splits["train"]
        counts = (np.asarray(split.class_pixels) for split in (train, self.split))
        lines = on_classes("pixels", self.data.classes, *counts)
        ignored = 1 - sum(train.class_pixels) / sum(height * width for height, width in train.sizes)
        if ignored > _IGNORED_SHARE:
            lines.append(f"{100 * ignored:.1f}% of the training images' pixels are ignored: they have no class")
        return lines

    def complexity(self, model: nn.Module) -> Complexity:
        return count_complexity(model, input_size=(3, self.recipe.crop_size, self.recipe.crop_size))

    def inspect(self, model: nn.Module, device: torch.device) -> list[Section]:
        """Some images, each with the classes that are there beside those that were predicted."""
        images = _Images(self.data, self.split)

        def predict(index: int) -> tuple[Tensor, Tensor, Tensor]:
            image, labels = images[index]
            return image, labels, self.inference(model, image.to(device)).argmax(0).cpu()

        return pictures_of(predict, [pair.image.name for pair in self.split.pairs], self.data.classes)

    def check_assets(self, folder: Path) -> None:
        if not self.data.has_one_order:
            check_classes(folder, self.data.classes)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Write the class names, so that the run can be used without its data."""
        if not (self.data.has_one_order and asset(folder, CLASSES_FILE).exists()):  # a run keeps the names that it has
            save_classes(folder, self.data.classes)

    def sizes(self) -> dict[str, int]:
        return {
            "train": len(self.data.splits["train"].pairs),
            "evaluated": len(self.data.splits[self.evaluated].pairs),
        }

    def facts(self) -> dict[str, Any]:
        images = {name: len(split.pairs) for name, split in self.data.splits.items()}
        return {
            "split": self.evaluated,
            "images": images,
            "unlabelled": len(self.data.unlabelled),
            "class_iou": self.class_iou,
            "commonest_class": self.most_common,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"class_iou": self.class_iou, "commonest_class": self.most_common}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.class_iou = state.get("class_iou", {})
        self.most_common = state.get("commonest_class", {})

    def notices(self) -> list[str]:
        notices, self.new_notices = self.new_notices, []
        return notices

    def _passes_of_rounds(self, shard: BatchShard) -> list[int]:
        """The most forward passes that any rank makes for its n-th image; FSDP needs the same number on every rank."""
        sizes = self.split.sizes
        of_ranks = [replace(shard, rank=rank).evaluation_batches(len(sizes), 1) for rank in range(shard.world_size)]
        return [
            max(self.inference.passes(sizes[batch.indices[0]]) for batch in of_round) for of_round in zip(*of_ranks)
        ]


class _Crops(Dataset):
    """The training samples: sample (pass, index) is a function of these numbers and the seed."""

    def __init__(self, data: SegmentationData, transform: v2.Transform, seed: int):
        self.data, self.transform, self.seed = data, transform, seed
        self.pairs = data.splits["train"].pairs if "train" in data.splits else ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        number_of_pass, index = key
        image, labels = _tensors(*self.data.read(self.pairs[index]))
        seed_sample(self.seed, number_of_pass, index)
        image, labels = self.transform(image, labels)
        return image.as_subclass(Tensor), labels.as_subclass(Tensor)


class _Images(Dataset):
    """Complete images (3, H, W) and their labels (H, W), both uint8."""

    def __init__(self, data: SegmentationData, split: Split):
        self.data, self.pairs = data, split.pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Batch:
        image, labels = _tensors(*self.data.read(self.pairs[index]))
        return image.as_subclass(Tensor), labels.as_subclass(Tensor)


def _tensors(image: Any, labels: np.ndarray) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
    return tv_tensors.Image(v2.functional.pil_to_tensor(image)), tv_tensors.Mask(torch.from_numpy(labels))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labelled pixels; 0 if there are none."""
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
