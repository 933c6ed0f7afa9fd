"""Image classification: augmented batches, cross-entropy, and top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from ...analysis.complexity import Complexity, count_complexity
from ...engine.randomness import data_order
from ...engine.task import BatchShard, Task
from ...errors import UserError
from ...models.build import build_model, check_model_name
from ...models.transfer import start_from, takes_head
from ...run_folder.inspection import Section
from ...settings.config import ClassificationRecipe
from ...settings.from_data import check_class_count, key_of_weights
from ..class_names import check_classes, save_classes
from ..loading import loaded
from ..normalization import Normalization, on_weights
from ..remarks import on_classes, on_largest_class, on_order, on_scored
from ..scoring import mean_loss, of_all_ranks, shared_by
from ..splits import split_of
from .data import (
    ImageData,
    SampleKey,
    Samples,
    StoredData,
    check_test_split,
    check_trainable,
    check_validated,
    load_images,
    open_images,
)
from .input_size import input_size
from .inputs import input_spec, normalization_of
from .inspection import Mistakes
from .resolve import resolve
from .transforms import InputSpec

__all__ = ["Classification", "build", "input_spec", "open_data", "resolve", "task_of"]

_EXAMPLES = 64

Batch = tuple[Tensor, Tensor]  # images (B, C, H, W) and labels (B)


def open_data(recipe: ClassificationRecipe, data: str, run: Path | None = None) -> StoredData:
    """Open the data once the model is known to exist, since opening may take long.

    Raises:
        UserError: the model or the data do not exist, or a training lacks images to train or validate on, or its test
            split.
    """
    check_model_name(recipe.model)
    opened = open_images(data)
    if run is None:
        check_trainable(data, opened.splits.train)
        if recipe.holdout is None and split_of(data)[1] == "val":
            check_validated(data, opened.splits.val)
    if recipe.score_test and run is None:
        check_test_split(opened, recipe.holdout)  # rather than after the training
    return opened


def build(
    recipe: ClassificationRecipe, data: str | None = None, run: Path | None = None, opened: StoredData | None = None
) -> tuple[nn.Module, Classification]:
    """Build the model and its task. Raises UserError if model or data do not exist, or do not fit each other."""
    model = build_model(recipe.model, pretrained=run is None)
    task = task_of(recipe, model, data or recipe.data, opened, for_training=run is None)
    if run:
        task.check_assets(run)
    check_class_count(recipe, getattr(model, "num_classes", None), len(task.data.classes), run)
    return model, task


def task_of(
    recipe: ClassificationRecipe,
    model: nn.Module,
    data: str,
    opened: StoredData | None = None,
    *,
    for_training: bool = True,
) -> Classification:
    """The task of a model on ``data``. Raises UserError if they do not exist, or cannot be the model's inputs."""
    spec = input_spec(recipe, model)
    images = load_images(
        data,
        spec,
        recipe.augment,
        recipe.seed,
        recipe.train_samples,
        holdout=recipe.holdout,
        clean_samples=recipe.clean_samples if for_training or split_of(data)[1] == "val" else 0,
        for_training=for_training,
        in_memory=recipe.cache == "memory" and not any(tensor.is_meta for tensor in model.parameters()),
        opened=opened,
    )
    own = normalization_of(recipe, model) if recipe.init else None
    task = Classification(recipe, images, spec, normalization=own, for_training=for_training)
    if len(images.classes) < 2:
        raise UserError(f"data: {data} has one class, {images.classes[0]}, expected at least two")
    return task


def macs(recipe: ClassificationRecipe) -> int:
    """Multiply-accumulates of a forward pass, at the size that the recipe trains at."""
    with torch.device("meta"):
        model = build_model(recipe.model, pretrained=False)
    return count_complexity(model, input_size(recipe, model)).macs


def normalization(recipe: ClassificationRecipe) -> Normalization:
    """The normalization of the images that a run was trained on."""
    with torch.device("meta"):
        return normalization_of(recipe, build_model(recipe.model, pretrained=False))


class Classification(Task):
    """The task: each epoch visits the training images in an order that is a function of (seed, epoch)."""

    monitor = "top1"
    unit, units_per_sample = "images", 1

    def __init__(
        self,
        recipe: ClassificationRecipe,
        data: ImageData,
        spec: InputSpec,
        *,
        normalization: Normalization | None = None,
        for_training: bool = True,
    ):
        """
        Args:
            data: read as ``spec`` says, with the recipe's augmentation.
            normalization: that of the images, to warn if the weights of ``recipe.init`` were trained with another.
            for_training: False if the task only evaluates: the data may have fewer training images than a batch, and
                nobody asks for the remarks, so the notices say what the scores do not cover.

        Raises:
            UserError: there are images to train on, but fewer than ``recipe.batch_size``.
        """
        count, augment = len(data.train), recipe.augment
        if for_training and 0 < count < recipe.batch_size:
            raise UserError(
                f"batch_size: got {recipe.batch_size}, expected 1 to {count}, the number of training images"
            )
        self.recipe, self.data, self.input_size, self.normalization = recipe, data, spec.input_size, normalization
        self.batch_size = recipe.batch_size if for_training else min(recipe.batch_size, count)
        self.copies = augment.aug_repeats if augment else 1
        self.steps_per_epoch = count // max(1, self.batch_size)  # the last, smaller batch is dropped
        self.undecodable: dict[str, None] = {}  # an ordered set
        self.shard = BatchShard()  # of the batches
        self.undecodable_before: list[str] = []  # of earlier processes of the run; perhaps mended since
        self.scored: int | None = None  # images of the latest evaluation that could be decoded
        self.new_notices = [] if for_training else self._not_scored()
        self.mixup: Mixup | None = None
        self.criterion: nn.Module = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        if augment and (augment.mixup > 0 or augment.cutmix > 0):
            self.mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=recipe.label_smoothing,
                num_classes=len(data.classes),
            )
            self.criterion = SoftTargetCrossEntropy()

    def order(self, epoch: int) -> list[SampleKey]:
        """The samples of an epoch. With repeated augmentation there are fewer, each in several consecutive copies.

        Ranks take neighboring parts of this order, so that copies of a sample are in one update (Hoffer et al., 2020).
        """
        order = data_order(self.recipe.seed, epoch, len(self.data.train))
        keys = ((epoch, int(index), copy) for index in order for copy in range(self.copies))
        return [key for key, _ in zip(keys, range(len(order)))]

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Batch]:
        self.shard, size = shard, shard.micro_batch_size(self.batch_size)
        if self.mixup and size % 2:
            raise UserError(f"batch_size: got {size} per forward pass, expected an even number of images for Mixup")
        order = self.order(epoch)
        keys = [
            [order[position] for position in positions]
            for update in range(start, self.steps_per_epoch)
            for positions in shard.micro_batches(update, self.batch_size)
        ]
        with self._loaded(self.data.train, keys, device) as batches:
            for images, labels, failed in batches:
                self._count_undecodable(failed)
                yield images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        if not model.training:  # without Mixup and label smoothing
            logits = model(images)
            return nn.functional.cross_entropy(logits.float(), labels), {"top1": _accuracy(logits, labels)}
        targets = labels
        if self.mixup:
            images, targets = self.mixup(images.clone(), labels)
        logits = model(images)  # (B, classes)
        name = "mixed_top1" if self.mixup else "top1"  # of the first of the two images that an input is mixed from
        return self.criterion(logits.float(), targets), {name: _accuracy(logits, labels)}

    def example_batch(self, device: torch.device) -> Batch:
        count = min(_EXAMPLES, len(self.data.val))
        images, labels, _ = self.data.val.batch([(0, index, 0) for index in range(count)])
        if not len(labels):
            raise UserError(f"data: none of the first {count} images to evaluate can be decoded, expected at least one")
        return images.to(device), labels.to(device)

    def load_pretrained(self, model: nn.Module) -> list[str]:
        init, key = self.recipe.init, key_of_weights(self.recipe, "init")
        if not init:
            return []
        told = on_weights(init, key, self.normalization)
        on_head = on_order(init, key, self.data.classes) if self.data.in_folders else []
        if on_head and takes_head(model, init, key):
            told += on_head
        return [start_from(model, init, key), *told]

    def remarks(self) -> list[str]:
        classes, of_split = self.data.classes, (self.data.train.labels, self.data.val.labels)
        counts = [np.bincount(labels, minlength=len(classes)) for labels in of_split]
        left_out = _left_out(self.data.train, self.data.val)
        return [*left_out, *on_classes("images", classes, *counts), *on_largest_class(classes, *counts)]

    def _not_scored(self) -> list[str]:
        """Lines about data that a score does not cover; before training, they are among the remarks."""
        classes = self.data.classes
        scored = np.bincount(self.data.val.labels, minlength=len(classes))
        return [*_left_out(self.data.val), *on_classes("images", classes, np.ones_like(scored), scored)]

    def complexity(self, model: nn.Module) -> Complexity:
        return count_complexity(model, input_size=self.input_size)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: BatchShard, device: torch.device) -> dict[str, float]:
        """Cross-entropy, top-1 and top-5 accuracy in percent; and loss and top-1 of the clean training samples, if any.

        Images that cannot be decoded are left out, and :meth:`notices` names them.

        Raises:
            UserError: more images than ``max_undecodable`` cannot be decoded, or more than half of a split's.
        """
        scores, scored = self._score(self.data.val, model, shard, device)
        if len(self.data.clean):
            clean, _ = self._score(self.data.clean, model, shard, device)
            scores |= {"train_clean_loss": clean["loss"], "train_clean_top1": clean["top1"]}
        self._count_undecodable(of_all_ranks(self.undecodable, shard))  # including those of the training before
        self._note_scored(scored)
        return scores

    def _score(
        self, samples: Samples, model: nn.Module, shard: BatchShard, device: torch.device
    ) -> tuple[dict[str, float], np.ndarray]:
        """The metrics, and how many images of each class they cover."""
        classes, shared = len(self.data.classes), shared_by(shard)
        truth, of_rank = samples.labels, np.zeros(classes, dtype=np.int64)
        metrics = {
            "loss": mean_loss(shard),
            "top1": MulticlassAccuracy(classes, average="micro", **shared),
            "top5": MulticlassAccuracy(classes, average="micro", top_k=min(5, classes), **shared),
        }
        for metric in metrics.values():
            metric.to(device)
        with closing(self._predicted(samples, model, shard, device)) as predicted:
            for indices, logits, labels in predicted:
                of_rank += np.bincount(truth[indices], minlength=classes)  # on the host: the device is not waited for
                metrics["loss"].update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
                metrics["top1"].update(logits, labels)
                metrics["top5"].update(logits, labels)
        batches = shard.evaluation_batches(len(samples), self.recipe.eval_batch_size)
        asked = sum(shard.gather(sum(len(batch.indices) for batch in batches if not batch.is_padding)))
        scored = np.sum(shard.gather(of_rank), axis=0)
        if 2 * scored.sum() < asked:  # the metrics would say little about the split
            if shard.rank > 0:  # rank 0 reports it, and no other rank goes on and waits for it
                raise SystemExit(2)
            got = f"{scored.sum()} of the {asked} images to evaluate can be decoded"
            such_as = (
                f"; the latest that cannot be decoded is {next(reversed(self.undecodable))}" if self.undecodable else ""
            )
            raise UserError(f"data: {got}, expected at least half of them{such_as}")
        loss, top1, top5 = (metrics[name].compute().item() for name in ("loss", "top1", "top5"))
        return {"loss": loss, "top1": round(100 * top1, 4), "top5": round(100 * top5, 4)}, scored

    def _note_scored(self, scored: np.ndarray) -> None:
        is_new, self.scored = self.scored != scored.sum(), int(scored.sum())
        if is_new and self.scored < len(self.data.val):
            evaluated = np.bincount(self.data.val.labels, minlength=len(scored))
            self.new_notices.append(on_scored("images", self.data.classes, evaluated, scored))

    def _predicted(
        self, samples: Samples, model: nn.Module, shard: BatchShard, device: torch.device
    ) -> Generator[tuple[list[int], Tensor, Tensor]]:
        """The indices, logits (B, classes) and labels (B) of the images in each of this rank's batches.

        Padding and images that cannot be decoded are left out.
        """
        batches = shard.evaluation_batches(len(samples), self.recipe.eval_batch_size)
        keys = [[(0, index, 0) for index in batch.indices] for batch in batches]
        with self._loaded(samples, keys, device) as found:
            for batch, (images, labels, failed) in zip(batches, found):
                self._count_undecodable(failed)
                if not len(labels):  # every rank calls the model equally often, as FSDP requires
                    images = images.new_zeros(1, *self.input_size)
                logits = model(images).float()
                if len(labels) and not batch.is_padding:
                    yield [index for index, name in zip(batch.indices, failed) if not name], logits, labels

    def inspect(self, model: nn.Module, device: torch.device) -> list[Section]:
        """The confusion of the classes, and the images with the highest loss."""
        mistakes = Mistakes()
        with closing(self._predicted(self.data.val, model, BatchShard(), device)) as predicted:
            for indices, logits, labels in predicted:
                mistakes.update(indices, logits, labels)
        return mistakes.sections(self.data.classes, self.data.val)

    def check_assets(self, folder: Path) -> None:
        check_classes(folder, self.data.classes)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Save the class names, so that a run can be used without its data."""
        save_classes(folder, self.data.classes)

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.data.train), "evaluated": len(self.data.val)}

    def facts(self) -> dict[str, Any]:
        samples = {**self.sizes(), **({} if self.scored is None else {"evaluated": self.scored})}
        return {"split": self.data.evaluated, "samples": samples, "undecodable": len(self._every_undecodable())}

    def state_dict(self) -> dict[str, Any]:
        return {"undecodable": list(of_all_ranks(self._every_undecodable(), self.shard)), "scored": self.scored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.undecodable_before, self.scored = state.get("undecodable", []), state.get("scored")

    def _every_undecodable(self) -> list[str]:
        return list(dict.fromkeys([*self.undecodable_before, *self.undecodable]))

    def notices(self) -> list[str]:
        notices, self.new_notices = self.new_notices, []
        return notices

    def _count_undecodable(self, failed: Iterable[str]) -> None:
        """Record samples that could not be decoded. Raises UserError if there are too many so far."""
        new = [name for name in dict.fromkeys(failed) if name and name not in self.undecodable]
        self.undecodable |= dict.fromkeys(new)
        self.new_notices += [f"skipped a sample that cannot be decoded, {name}" for name in new]
        if len(self.undecodable) > (most := self.recipe.max_undecodable):
            raise UserError(
                f"data: {len(self.undecodable)} samples cannot be decoded, expected at most max_undecodable={most}; "
                f"the latest is {next(reversed(self.undecodable))}"
            )

    def _loaded(
        self, samples: Dataset, keys: list[list[SampleKey]], device: torch.device
    ) -> AbstractContextManager[Iterator[Any]]:
        return loaded(samples, device, self.recipe.workers, len(keys), batch_sampler=keys, collate_fn=_as_it_is)


def _left_out(*splits: Samples) -> list[str]:
    """What the sources of these splits left out, each line once."""
    told = (getattr(split.images, "left_out", "") for split in splits)
    return [*dict.fromkeys(line for line in told if line)]


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean() * 100


def _as_it_is(batch: Any) -> Any:
    """The samples come as a batch already."""
    return batch
