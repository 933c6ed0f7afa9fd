"""Every setting that a run can be given, and the recipe types.

A recipe is data with a name: a model, its baseline, a task and its settings. Each field declares its type,
bounds and meaning in one line; pydantic checks them wherever a recipe is made, be it in Python, by
``key=value`` or from a run's ``config.yaml`` (overrides.py). Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from ..errors import UserError
from .augmentation import Augment, DetectionAugment, SegmentationAugment
from .field_types import STRICT, BelowOne, Count, Factor, Positive, Share, Side

__all__ = [
    "ABOUT_THE_RECIPE",
    "MAY_CHANGE_ON_RESUME",
    "OF_THE_DATA",
    "OF_THE_LENGTH",
    "OF_THE_MODEL",
    "RECIPE_TYPES",
    "Augment",
    "ClassificationRecipe",
    "DetectionAugment",
    "DetectionRecipe",
    "LanguageRecipe",
    "ModelSpec",
    "Recipe",
    "SegmentationAugment",
    "SegmentationRecipe",
    "TrainingSettings",
    "adamw_defaults_in",
    "key_of",
    "DenseRecipe",
]

_OWN_OF_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8}  # what AdamW uses if a recipe gives null

_MOST_WINDOWS = 4096  # the most in which one image may be evaluated

Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: _as_names(given))]  # a single one, or a list


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingSettings:
    """Hyper-parameters by timm's names. Times are in epochs, rates are per update."""

    epochs: Count = Field(default=300, description="passes over the training data")
    earlier_epochs: tuple[tuple[Count, Count], ...] = Field(
        default=(), description="[update, epochs] for each earlier length of the schedule, which held until that update"
    )
    batch_size: Count = Field(default=1024, description="samples per update, over all ranks and accumulated parts")
    accumulation_steps: Count = Field(default=1, description="forward passes per update on each rank, to save memory")
    opt: str = Field(default="adamw", description="any of timm's optimizers")
    lr: float = Field(default=1e-3, ge=0, le=1e6, description="the highest learning rate")
    lr_base_size: Count | None = Field(
        default=None,
        description="batch_size that lr is meant for; lr is scaled from it to batch_size; null: lr is not scaled",
    )
    lr_base_scale: Literal["linear", "sqrt"] = Field(default="linear", description="how lr is scaled with batch_size")
    betas: tuple[BelowOne, BelowOne] | None = Field(
        default=None,
        description="for optimizers that have two; null: the optimizer's own default, for adamw 0.9 and 0.999",
    )
    momentum: BelowOne = Field(default=0.9, description="for optimizers that have it in place of betas")
    eps: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="eps of the optimizer; null: its own default, for adamw 1e-8"
    )
    weight_decay: float = Field(
        default=0.05, ge=0, le=1e6, description="not applied to norms, biases and what the model exempts"
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="learning rate of each block as a share of the next block's; null: the same for all"
    )
    sched: Literal["cosine", "poly", "multistep"] = Field(
        default="cosine", description="learning rate schedule after the warmup"
    )
    poly_power: Factor = Field(default=1.0, description="for sched=poly: the exponent")
    milestones: tuple[Positive, ...] = Field(
        default=(), description="for sched=multistep: epochs after which the rate drops"
    )
    decay_rate: Share = Field(default=0.1, description="for sched=multistep: the factor of each drop")
    warmup_epochs: float = Field(default=20.0, ge=0, le=2**31, description="length of the linear warmup from warmup_lr")
    warmup_lr: float = Field(default=5e-7, ge=0, le=1e6, description="learning rate at which the warmup begins")
    min_lr: float = Field(
        default=5e-6, ge=0, le=1e6, description="learning rate at which the schedule ends; not for sched=multistep"
    )
    clip_grad: float | None = Field(
        default=5.0, ge=1e-6, le=1e9, description="largest norm of all gradients together; null: no clipping"
    )
    amp_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="precision of the forward pass"
    )
    ema_decay: BelowOne | None = Field(
        default=None, description="decay of a moving average of the weights, which is then evaluated; null: no average"
    )
    grad_checkpointing: Share | tuple[Side, ...] = Field(
        default=0.0,
        description="blocks that the backward pass recomputes: a share of them, from the first on, or a list of steps",
    )
    compile: bool = Field(default=False, description="torch.compile, one block at a time")
    cuda_graph: bool = Field(
        default=False,
        description="replay the passes through the model as CUDA graphs: for narrow, deep models on a GPU",
    )
    parallel: Literal["ddp", "fsdp"] = Field(default="ddp", description="how torchrun's processes share the model")
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="seed of the weights, the order of the data and all other randomness"
    )
    device: str = Field(default="auto", description="cpu, cuda, …; auto: an accelerator if there is one")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="CPU threads per process; null: torch's choice, which config.yaml then records",
    )
    workers: int = Field(default=0, ge=0, le=1024, description="processes per rank that load images; text needs none")
    keep_checkpoints: Count = Field(
        default=2, description="latest checkpoints to keep; the best by the task's metric is kept as well"
    )
    checkpoint_interval: int = Field(
        default=0, ge=0, le=2**31, description="updates between checkpoints within an epoch; 0: only at its end"
    )
    log_interval: Count = Field(default=50, description="updates between lines in metrics.jsonl")
    tracker: Literal["tensorboard", "trackio", "wandb"] | None = Field(
        default=None,
        description="also gets the metrics, besides metrics.jsonl and (where installed) TensorBoard; null: no other",
    )
    stream_epochs: int = Field(
        default=0, ge=0, le=2**31, description="epochs between measurements of the residual stream; 0: never"
    )
    stream_interval: int = Field(
        default=0,
        ge=0,
        le=2**31,
        description="updates between such measurements in training, which run without compilation; 0: never",
    )

    def __post_init__(self) -> None:
        for name in adamw_defaults_in(vars(self)):
            object.__setattr__(self, name, None)

    def epochs_at(self, step: int) -> int:
        """The length in epochs that the schedule has at an update: ``epochs``, or one of ``earlier_epochs``."""
        earlier = (epochs for until, epochs in sorted(self.earlier_epochs) if step < until)
        return next(earlier, self.epochs)


# Fields that may change when a run is resumed, say on another machine. If they change a result at all, it is by
# rounding, and by what each rank and each part of a batch has for itself: dropout, Mixup's pairs, statistics of batch
# norms, and the mean over whatever counts in it, such as the labelled pixels of a segmenter's crops.
MAY_CHANGE_ON_RESUME = {
    "device",
    "threads",
    "workers",
    "keep_checkpoints",
    "checkpoint_interval",
    "accumulation_steps",
    "parallel",
    "cuda_graph",
    "compile",
    "max_undecodable",
    "log_interval",
    "expected",
    "tracker",
    "stream_epochs",
    "stream_interval",
    "title",
    "cache",
    "eval_batch_size",
    "import_from",
}


# Groups of fields that are not about how a model is trained, for code that compares recipes or results.
OF_THE_MODEL = {"model", "baseline", "init", "baseline_init", "backbone", "baseline_backbone"}
OF_THE_DATA = ("data", "holdout", "train_samples", "tokenizer", "vocab_size")
OF_THE_LENGTH = ("epochs", "epoch_updates", "seq_len")
ABOUT_THE_RECIPE = {"name", "title", "expected"}


@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """What ``timm.create_model`` is called with, or the arguments of a detector, segmenter or language model."""

    name: str = Field(description="a model that `stepsnet models` lists, any timm model, or a model of another task")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the model")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe(TrainingSettings):
    """What every task's recipe has; ``task`` says which kind it is."""

    name: str = Field(min_length=1, description="name of the recipe; the run folder is named after it")
    title: str = Field(default="", description="what the recipe is, in one line")
    task: str = Field(description="classification, detection, language or segmentation")
    model: ModelSpec = Field(description="the model that is trained")
    baseline: ModelSpec | None = Field(default=None, description="model of similar compute, for `stepsnet compare`")
    data: str = Field(description="KIND:PATH, or the name of data that are installed already, such as digits")
    expected: dict[str, float] = Field(default_factory=dict, description="metrics as the paper prints them")
    imports: Names = Field(
        default=(),
        alias="import",
        description="modules of your own that register a model, data or a task: one name or a list",
    )
    import_from: str | None = Field(
        default=None, description="folder in which these modules are also looked up; null: that of the recipe's file"
    )
    predicts_from: ClassVar[Literal["files", "prompt"]] = "files"
    scores: ClassVar[tuple[str, ...]] = ()  # the metrics of its runs, if known; training batches have the first one
    left_open: ClassVar[Mapping[str, Any]] = {}  # fields that the data may decide, with the value that leaves them open

    def sizes_in_memory(self, micro_batch: int) -> list[tuple[str, int, float]]:
        """What a run holds at once, by the recipe alone: the keys that decide it, samples, and numbers in each."""
        return []

    def of_baseline(self) -> Recipe:
        """The same recipe with the baseline as its model. Raises UserError if there is none."""
        if self.baseline is None:
            raise UserError(f"recipe: {self.name} has no baseline, expected one to compare with")
        return dataclasses.replace(self, model=self.baseline)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassificationRecipe(Recipe):
    task: Literal["classification"] = "classification"
    scores: ClassVar[tuple[str, ...]] = ("top1", "top5", "loss")
    left_open: ClassVar[Mapping[str, Any]] = {"img_size": "data", "crop_pct": None, "crop_mode": None}
    train_samples: Count | None = Field(default=None, description="number of training images to use; null: all of them")
    holdout: Count | None = Field(
        default=None,
        description="training images to validate on instead of the other split, which is then DATA@test; null: none",
    )
    score_test: bool = Field(default=False, description="score DATA@test once, when the training has ended")
    clean_samples: int = Field(
        default=0, ge=0, le=2**31, description="training images that are scored without augmentation after every epoch"
    )
    eval_batch_size: Count = Field(
        default=256, description="largest number of images per forward pass in evaluation, on each rank"
    )
    cache: Literal["memory"] | None = Field(
        default=None, description="memory: keep the decoded images; null: decode them each time"
    )
    img_size: Side | Literal["data"] | None = Field(
        default=None, description="side of the input; data: that of the training images; null: the model's own"
    )
    crop_pct: Annotated[float, Field(ge=0.1, le=1)] | None = Field(
        default=None,
        description="share of the resized image that is evaluated; null: the model's own, or 1 with img_size=data",
    )
    crop_mode: Literal["center", "squash", "border"] | None = Field(
        default=None, description="how an evaluated image becomes a square, by timm's names; null: the model's own way"
    )
    init: str | None = Field(
        default=None, description="weights to start from: a run, a file or timm:NAME; null: random weights"
    )
    baseline_init: str | None = Field(default=None, description="init of the baseline, for `stepsnet compare`")
    augment: Augment | None = Field(default=None, description="augmentation of the training images; null: none")
    label_smoothing: BelowOne = Field(default=0.0, description="smoothing of the targets; 0: none")
    max_undecodable: int = Field(
        default=100, ge=0, le=2**31, description="undecodable samples that may be skipped before the run stops"
    )

    def sizes_in_memory(self, micro_batch: int) -> list[tuple[str, int, float]]:
        side = self.img_size or self.model.args.get("img_size")
        return [("img_size and batch_size", micro_batch, 3 * side**2)] if isinstance(side, int) else []

    def of_baseline(self) -> Recipe:
        return _starting_from_its_own(self, super().of_baseline(), "init")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LanguageRecipe(Recipe):
    """``batch_size`` is in sequences."""

    predicts_from: ClassVar[Literal["files", "prompt"]] = "prompt"
    task: Literal["language"] = "language"
    scores: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "bits_per_character", "word_perplexity")
    tokenizer: Literal["bpe", "characters", "gpt2"] = Field(
        default="bpe", description="kind of tokenizer; bpe is trained on the training split"
    )
    vocab_size: int | None = Field(default=None, ge=2, le=2**24, description="for tokenizer=bpe: the number of tokens")
    seq_len: int = Field(default=128, ge=1, le=2**20, description="tokens per sequence")
    epoch_updates: Count | None = Field(default=None, description="updates per epoch; null: one pass over the text")
    eval_batch_size: Count = Field(
        default=32, description="largest number of windows per forward pass in evaluation, on each rank"
    )
    eval_stride: Count | None = Field(
        default=None, description="tokens scored per window of seq_len; null: all of them"
    )
    holdout: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the training text to validate on instead of the other split, which is then DATA@test; "
        "null: none",
    )
    score_test: bool = Field(default=False, description="score DATA@test once, when the training has ended")
    clean_samples: int = Field(
        default=0, ge=0, le=2**31, description="training sequences that are scored after every epoch"
    )

    def sizes_in_memory(self, micro_batch: int) -> list[tuple[str, int, float]]:
        vocabulary = self.model.args.get("vocab_size", 1)
        if not isinstance(vocabulary, int):  # the model's constructor refuses it
            return []
        return [("seq_len and batch_size", micro_batch, self.seq_len * vocabulary)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DenseRecipe(Recipe):
    """A recipe on the backbone of a classifier."""

    backbone: str | None = Field(
        default=None, description="a classifier to start from: a run, a file or timm:NAME; null: random weights"
    )
    baseline_backbone: str | None = Field(default=None, description="backbone of the baseline, for `stepsnet compare`")
    holdout: Count | None = Field(
        default=None,
        description="training images to validate on instead of the val split, which is then DATA@test; null: none",
    )
    score_test: bool = Field(default=False, description="score DATA@test once, when the training has ended")

    def of_baseline(self) -> Recipe:
        return _starting_from_its_own(self, super().of_baseline(), "backbone")


_PRECISIONS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DetectionRecipe(DenseRecipe):
    task: Literal["detection"] = "detection"
    scores: ClassVar[tuple[str, ...]] = ("loss", *(f"{of}_{kind}" for of in ("box", "mask") for kind in _PRECISIONS))
    augment: DetectionAugment | None = Field(
        default=None, description="augmentation of the training images; null: only resized, as in evaluation"
    )
    max_invalid: int = Field(
        default=0,
        ge=0,
        le=2**31,
        description="annotations per split that may be left out (a box without area or outside its image, a wrong "
        "mask) or cut to the image (a box that extends beyond it)",
    )
    without_objects: Literal["refuse", "leave_out", "train"] = Field(
        default="refuse", description="what to do with training images without objects"
    )

    def sizes_in_memory(self, micro_batch: int) -> list[tuple[str, int, float]]:
        shorter, longer = self.model.args.get("size", 800), self.model.args.get("max_size", 1333)
        if self.augment and self.augment.sizes:
            shorter, longer = max(self.augment.sizes), self.augment.max_size or longer
        if not all(isinstance(side, int) for side in (shorter, longer)):  # the constructor refuses them
            return []
        return [("augment.sizes and batch_size", micro_batch, 3 * shorter * longer)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationRecipe(DenseRecipe):
    """Fields that begin with ``eval_`` say how whole images are tested."""

    task: Literal["segmentation"] = "segmentation"
    scores: ClassVar[tuple[str, ...]] = ("pixel_accuracy", "miou", "macc", "loss")
    scale: tuple[Side, Side] = Field(
        default=(2048, 512), description="long and short side of the frame that images are resized to fit"
    )
    crop_size: Side = Field(default=512, description="side of the training crops")
    augment: SegmentationAugment = Field(
        default_factory=SegmentationAugment, description="augmentation of the training images"
    )
    epoch_updates: Count | None = Field(default=None, description="updates per epoch; null: one pass over the images")
    eval_window: Side | None = Field(default=None, description="side of sliding windows; null: the whole image at once")
    eval_stride: Side | None = Field(
        default=None, description="pixels from one window to the next; null: the side of a window"
    )
    eval_scales: tuple[Factor, ...] = Field(
        default=(1.0,), min_length=1, description="factors of scale whose predictions are averaged"
    )
    eval_flip: bool = Field(default=False, description="average with the prediction for the flipped image too")

    def sizes_in_memory(self, micro_batch: int) -> list[tuple[str, int, float]]:
        image = 3 * self.scale[0] * self.scale[1]
        return [
            ("crop_size and batch_size", micro_batch, 3 * self.crop_size**2),
            ("scale and augment.scale_range", 1, image * self.augment.scale_range[1] ** 2),
            ("scale and eval_scales", 1, image * max(self.eval_scales) ** 2),
        ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_stride and not self.eval_window:
            raise UserError(f"eval_stride: got {self.eval_stride}, expected none without eval_window, whose step it is")
        if self.eval_stride and self.eval_window and self.eval_stride > self.eval_window:
            raise UserError(f"eval_stride: got {self.eval_stride}, expected at most eval_window, {self.eval_window}")
        if self.eval_window:
            step = self.eval_stride or self.eval_window
            longest = (side * max(self.eval_scales) for side in self.scale)
            windows = math.prod(1 + max(0, math.ceil((side - self.eval_window) / step)) for side in longest)
            if windows > _MOST_WINDOWS:
                given = f"eval_window: got {self.eval_window} with a stride of {step}, {windows:,} windows per image"
                raise UserError(f"{given}, expected at most {_MOST_WINDOWS:,}")


# by task; tasks/__init__.py adds the types of tasks that a user's module registers
RECIPE_TYPES: dict[str, type[Recipe]] = {
    "classification": ClassificationRecipe,
    "detection": DetectionRecipe,
    "language": LanguageRecipe,
    "segmentation": SegmentationRecipe,
}


def adamw_defaults_in(settings: Mapping[str, Any]) -> list[str]:
    """The settings that only repeat AdamW's own defaults: null means the same, and older recipes spelled them out."""
    if settings.get("opt") != "adamw":
        return []
    given = {name: settings.get(name) for name in _OWN_OF_ADAMW}
    return [name for name, value in given.items() if _as_tuple(value) == _OWN_OF_ADAMW[name]]


def key_of(kind: type, name: str) -> str:
    """The key of a field in text, such as ``import`` for ``imports``: Python allows no field named ``import``."""
    return kind.__pydantic_fields__[name].alias or name  # type: ignore[attr-defined]


def _as_names(given: Any) -> Any:
    return (given,) if isinstance(given, str) else _as_tuple(given)


def _as_tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _starting_from_its_own(recipe: Recipe, of_baseline: Recipe, key: str) -> Recipe:
    """``of_baseline`` with the weights that ``recipe`` names for it. Raises UserError if only one model has weights."""
    own, baselines = getattr(recipe, key), getattr(recipe, f"baseline_{key}")
    if (own is None) != (baselines is None):
        missing, given = (f"baseline_{key}", key) if own else (key, f"baseline_{key}")
        raise UserError(f"{missing}: got none although {given} is given, expected weights for both models or neither")
    return dataclasses.replace(of_baseline, **{key: baselines})
