"""Image classification: augmented batches, cross-entropy, and top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import Mixup, resolve_model_data_config
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ..analysis.complexity import count_complexity
from ..analysis.shortcut_ratio import shortcut_ratios
from ..engine.randomness import data_order
from ..engine.task import Share
from ..errors import UserError
from ..models.build import build_model, input_size_of
from ..recipes.recipe import ClassificationRecipe
from ..stream import step_sequences
from .held_out import split_of
from .image_data import ImageData, InputSpec, Place, Samples, load_images
from .loading import make_loader
from .settings import Augment
from .setup import Setup

__all__ = ["Classification", "input_spec", "set_up"]

_EVALUATED_AT_ONCE = 256
_IMAGES_PROBED = 64


def set_up(recipe: ClassificationRecipe, data: str | None = None, run: Path | None = None) -> Setup:
    """Raises UserError for a model or data that are not there, or that do not fit each other."""
    model = build_model(recipe.model)
    spec = input_spec(recipe, model)
    data = data or recipe.data
    images = load_images(
        data,
        spec,
        recipe.augment,
        recipe.seed,
        recipe.train_samples,
        holdout=recipe.holdout,
        clean_samples=recipe.clean_samples if split_of(data)[1] == "val" else 0,
        in_memory=recipe.cache == "memory",
    )
    task = Classification(
        images,
        recipe.batch_size,
        seed=recipe.seed,
        label_smoothing=recipe.label_smoothing,
        augment=recipe.augment,
        workers=recipe.workers,
        max_undecodable=recipe.max_undecodable,
    )
    _check_classes(model, images)

    def sample(device: torch.device) -> tuple[Tensor, Tensor]:
        """The first of the validation split, which no augmentation touches."""
        inputs, labels, _ = _collate([images.val[0, i, 0] for i in range(min(_IMAGES_PROBED, len(images.val)))])
        return inputs.to(device), labels.to(device)

    def probe(model: nn.Module, device: torch.device) -> dict:
        return shortcut_ratios(model, sample(device)[0])

    look = probe if step_sequences(model) else None
    return Setup(model, task, partial(count_complexity, input_size=spec.input_size), sample, look)


def input_spec(recipe: ClassificationRecipe, model: nn.Module) -> InputSpec:
    """How pictures become this model's inputs: timm's data config, at the size that the model is built for."""
    config = resolve_model_data_config(model)
    chans, height, width = input_size_of(recipe.model, model)
    height, width = (recipe.img_size,) * 2 if recipe.img_size else (height, width)
    mean, std = config["mean"], config["std"]
    if chans == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    crop_pct = recipe.crop_pct or config["crop_pct"]
    return InputSpec((chans, height, width), tuple(mean), tuple(std), config["interpolation"], crop_pct)


def _check_classes(model: nn.Module, images: ImageData) -> None:
    """Raises UserError where the model's head has another number of classes than the data."""
    got, expected = getattr(model, "num_classes", None), len(images.classes)
    if got is not None and got != expected:
        raise UserError(f"model.args.num_classes: got {got}, expected the data's {expected}")


class Classification:
    """The task: each epoch visits the training images in an order of (seed, epoch)."""

    monitor, lower_is_better = "top1", False
    unit, units_per_sample = "images", 1

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        *,
        seed: int = 0,
        label_smoothing: float = 0.0,
        augment: Augment | None = None,
        workers: int = 0,
        max_undecodable: int = 100,
    ):
        """
        Args:
            batch_size: samples an update, over all ranks and accumulated parts.
            workers: processes a rank that decode and augment; the batches are the same with any number.
            max_undecodable: so many files may be passed over before the run stops.

        Raises:
            UserError: there are fewer training images than ``batch_size``.
        """
        if not 1 <= batch_size <= len(data.train):
            raise UserError(f"batch_size: got {batch_size}, expected 1 to the {len(data.train)} training images")
        self.data, self.batch_size, self.seed, self.workers = data, batch_size, seed, workers
        self.copies = augment.aug_repeats if augment else 1
        self.steps_per_epoch = len(data.train) // batch_size  # the last, smaller batch is dropped
        self.max_undecodable = max_undecodable
        self.undecodable: dict[str, None] = {}
        self.told = 0
        self.mixup: Mixup | None = None
        self.criterion: nn.Module = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        if augment and (augment.mixup > 0 or augment.cutmix > 0):
            self.mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=label_smoothing,
                num_classes=len(data.classes),
            )
            self.criterion = SoftTargetCrossEntropy()

    def order(self, epoch: int) -> list[Place]:
        """The samples of an epoch: with repeated augmentation fewer of them, each in several copies in a row.

        Ranks take neighbouring parts of it, so that copies of a sample meet in one update (Hoffer et al., 2020).
        """
        order = data_order(self.seed, epoch, len(self.data.train))
        places = ((epoch, int(index), copy) for index in order for copy in range(self.copies))
        return [place for place, _ in zip(places, range(len(order)))]

    def batches(self, epoch: int, start: int, share: Share, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        if self.mixup and share.micro_batch_size(self.batch_size) % 2:
            size = share.micro_batch_size(self.batch_size)
            raise UserError(f"batch_size: got {size} images a forward pass, expected an even number for Mixup")
        order = self.order(epoch)
        chosen = [
            [order[position] for position in positions]
            for update in range(start, self.steps_per_epoch)
            for positions in share.micro_batches(update, self.batch_size)
        ]
        for images, labels, failed in self._loader(self.data.train, chosen, device):
            self._count_undecodable(failed)
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        targets = labels
        if self.mixup:
            images, targets = self.mixup(images.clone(), labels)
        logits = model(images)  # (B, classes)
        # under Mixup, the share of images that are taken for the first of the two that they are made of
        top1 = (logits.argmax(-1) == labels).float().mean() * 100
        return self.criterion(logits.float(), targets), {"top1": top1}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        """Loss and accuracies on the evaluated split, and on the training images that were asked for."""
        scores = self._score(self.data.val, model, share, device)
        if not len(self.data.clean):
            return scores
        clean = self._score(self.data.clean, model, share, device)
        return {**scores, "train_clean_loss": clean["loss"], "train_clean_top1": clean["top1"]}

    def _score(self, samples: Samples, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        count, classes = len(samples), len(self.data.classes)
        metrics = {
            "loss": MeanMetric(),
            "top1": MulticlassAccuracy(classes, average="micro"),
            "top5": MulticlassAccuracy(classes, average="micro", top_k=min(5, classes)),
        }
        for metric in metrics.values():
            metric.to(device)
        # Every rank makes equally many forward passes, as FSDP asks: the last ones repeat sample 0, uncounted.
        at_once = min(_EVALUATED_AT_ONCE, -(-count // share.world_size))
        rounds = -(-count // (at_once * share.world_size))
        first = [(turn * share.world_size + share.rank) * at_once for turn in range(rounds)]
        positions = [range(start, min(start + at_once, count)) or range(1) for start in first]
        batches = [[(0, position, 0) for position in batch] for batch in positions]
        for start, (images, labels, failed) in zip(first, self._loader(samples, batches, device)):
            self._count_undecodable(failed)
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            logits = model(images).float()
            if start < count:
                metrics["loss"].update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
                metrics["top1"].update(logits, labels)
                metrics["top5"].update(logits, labels)
        loss, top1, top5 = (metrics[name].compute().item() for name in ("loss", "top1", "top5"))
        return {"loss": loss, "top1": round(100 * top1, 4), "top5": round(100 * top5, 4)}

    def facts(self) -> dict[str, Any]:
        sizes = {"train": len(self.data.train), "evaluated": len(self.data.val)}
        return {"split": self.data.evaluated, "samples": sizes, "undecodable": len(self.undecodable)}

    def notices(self) -> list[str]:
        new = list(self.undecodable)[self.told :]
        self.told = len(self.undecodable)
        return [f"passed over a sample that cannot be decoded, {name}" for name in new]

    def _count_undecodable(self, failed: Sequence[str]) -> None:
        self.undecodable |= dict.fromkeys(name for name in failed if name)
        if len(self.undecodable) > self.max_undecodable:
            raise UserError(
                f"data: {len(self.undecodable)} samples cannot be decoded, expected at most max_undecodable="
                f"{self.max_undecodable}; the latest is {list(self.undecodable)[-1]}"
            )

    def _loader(self, samples: Dataset, batches: list[list[Place]], device: torch.device) -> DataLoader:
        return make_loader(samples, device, self.workers, len(batches), batch_sampler=batches, collate_fn=_collate)


def _collate(samples: Sequence[tuple[Tensor, int, str]]) -> tuple[Tensor, Tensor, list[str]]:
    images, labels, failed = zip(*samples)
    return torch.stack(images), torch.from_numpy(np.asarray(labels, dtype=np.int64)), list(failed)
