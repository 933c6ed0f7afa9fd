"""A recipe is data with a name: the model, its baseline, the task and the settings of a run.

Overrides from the command line, ``key=value``, and a run's ``config.yaml`` are read by pydantic, which
knows the types; an unknown key names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..engine.settings import TrainingSettings
from ..errors import UserError, nearest
from ..tasks.settings import Augment, DetectionAugment, SegmentationAugment

__all__ = [
    "ClassificationRecipe",
    "DetectionRecipe",
    "LanguageRecipe",
    "ModelSpec",
    "Recipe",
    "SegmentationRecipe",
    "override",
    "read_recipe",
    "to_yaml",
]


@dataclass(frozen=True)
class ModelSpec:
    """What ``timm.create_model`` is called with, or a language model's configuration."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingSettings):
    """What every task's recipe has; ``task`` says which kind it is."""

    name: str
    task: str
    model: ModelSpec
    baseline: ModelSpec | None = None  # of like compute, for ``stepsnet compare``
    data: str  # KIND:PLACE, or the name of what comes with an installation
    expected: dict[str, float] = field(default_factory=dict)  # what the paper prints

    def __post_init__(self) -> None:
        least: dict[str, float] = {"epochs": 1, "batch_size": 1, "keep_checkpoints": 1, "probe_epochs": 0, "seed": 0}
        least |= {"lr": 0.0, "min_lr": 0.0, "warmup_lr": 0.0, "warmup_epochs": 0.0, "weight_decay": 0.0}
        least |= {"accumulation_steps": 1, "workers": 0, "log_interval": 1, "checkpoint_interval": 0}
        least |= {"signal_interval": 0, "max_invalid": 0, "crop_size": 1, "eval_window": 1}
        least |= {"max_undecodable": 0, "seq_len": 1, "eval_stride": 1, "vocab_size": 2, "epoch_updates": 1}
        least |= {"clean_samples": 0}
        for name, smallest in least.items():
            value = getattr(self, name, None)  # each kind has some of them
            if value is not None and not value >= smallest:
                raise UserError(f"{name}: got {value}, expected at least {smallest}")
        for name in ("ema_decay", "layer_decay", "grad_checkpointing", "crop_pct"):
            value = getattr(self, name, None)
            if not (value is None or isinstance(value, tuple) or 0 <= value <= 1):
                raise UserError(f"{name}: got {value}, expected 0 to 1")

    def of_baseline(self) -> Recipe:
        """The same with the baseline for its model. Raises UserError where the recipe has none."""
        if self.baseline is None:
            raise UserError(f"recipe: {self.name} has no baseline, expected one to compare with")
        return dataclasses.replace(self, model=self.baseline)


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(Recipe):
    task: Literal["classification"] = "classification"
    train_samples: int | None = None  # of the training split; None is all
    holdout: int | None = None  # training images set aside to validate on; the other split is then DATA@test
    score_test: bool = False  # score DATA@test, once, when the training has ended
    clean_samples: int = 0  # training images that evaluation scores too, without augmentation
    cache: Literal["memory"] | None = None  # keep pictures decoded, as uint8
    img_size: int | None = None  # None is the model's own
    crop_pct: float | None = None  # share of the resized picture that evaluation sees; None is the model's own
    augment: Augment | None = None
    label_smoothing: float = 0.0
    max_undecodable: int = 100  # samples that may be passed over before the run stops


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """``batch_size`` is in sequences."""

    task: Literal["language"] = "language"
    tokenizer: Literal["bpe", "characters", "gpt2"] = "bpe"
    vocab_size: int | None = None  # of a BPE that is trained on the training split
    seq_len: int = 128  # tokens
    epoch_updates: int | None = None  # updates between evaluations; None is one pass over the text
    eval_stride: int | None = None  # tokens scored in each window of seq_len; None is all of them
    holdout: float | None = None  # share of the training text set aside to validate on; the other split is DATA@test
    score_test: bool = False  # score DATA@test, once, when the training has ended
    clean_samples: int = 0  # sequences of the training text that evaluation scores too


@dataclass(frozen=True, kw_only=True)
class DenseRecipe(Recipe):
    """On the backbone of a classifier: where its weights are, a run's folder or a file of weights."""

    backbone: str | None = None  # None is random weights
    baseline_backbone: str | None = None  # the baseline's, for ``stepsnet compare``

    def of_baseline(self) -> Recipe:
        if (self.backbone is None) != (self.baseline_backbone is None):
            missing, given = ("baseline_backbone", "backbone") if self.backbone else ("backbone", "baseline_backbone")
            raise UserError(f"{missing}: got none beside {given}, expected the classifiers of both models or of none")
        return dataclasses.replace(super().of_baseline(), backbone=self.baseline_backbone)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(DenseRecipe):
    task: Literal["detection"] = "detection"
    augment: DetectionAugment | None = None  # None trains on the sizes of evaluation
    max_invalid: int = 0  # annotations that may be left out because their box has no area or lies outside its image
    without_objects: Literal["refuse", "leave_out", "train"] = "refuse"  # what to do with such training images

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment is None:
            return
        for name in ("sizes", "crop_sizes"):
            if min(getattr(self.augment, name), default=0) < 1:
                raise UserError(f"augment.{name}: got {getattr(self.augment, name)}, expected sides in pixels")
        if self.augment.max_size < 1:
            raise UserError(f"augment.max_size: got {self.augment.max_size}, expected a side in pixels")
        low, high = self.augment.crop_range
        if not 1 <= low <= high:
            raise UserError(f"augment.crop_range: got {low}, {high}, expected two sides in pixels, the smaller first")
        for name in ("flip", "crop"):
            if not 0 <= getattr(self.augment, name) <= 1:
                raise UserError(f"augment.{name}: got {getattr(self.augment, name)}, expected 0 to 1")


@dataclass(frozen=True, kw_only=True)
class SegmentationRecipe(DenseRecipe):
    """Fields that begin with ``eval_`` say how whole pictures are tested."""

    task: Literal["segmentation"] = "segmentation"
    scale: tuple[int, int] = (2048, 512)  # long and short side that pictures are resized to fit within
    crop_size: int = 512  # side of training's crops
    augment: SegmentationAugment = field(default_factory=SegmentationAugment)
    epoch_updates: int | None = None  # updates between evaluations; None is one pass over the pictures
    eval_window: int | None = None  # side of sliding windows; None is the picture in one piece
    eval_stride: int | None = None  # from one window to the next; None is a window's side
    eval_scales: tuple[float, ...] = (1.0,)  # factors of scale, of which the probabilities are averaged
    eval_flip: bool = False  # and with those of the flipped picture

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.scale) < 1:
            raise UserError(f"scale: got {self.scale}, expected two sides in pixels")
        if not self.eval_scales or min(self.eval_scales) <= 0:
            raise UserError(f"eval_scales: got {self.eval_scales}, expected factors above 0")
        if self.eval_stride and self.eval_stride > (self.eval_window or 0):
            raise UserError(f"eval_stride: got {self.eval_stride}, expected at most eval_window, {self.eval_window}")
        low, high = self.augment.scale_range
        if not 0 < low <= high:
            raise UserError(
                f"augment.scale_range: got {low}, {high}, expected two factors above 0 that do not decrease"
            )
        for name in ("max_class_share", "hflip"):
            if not 0 <= getattr(self.augment, name) <= 1:
                raise UserError(f"augment.{name}: got {getattr(self.augment, name)}, expected 0 to 1")


KINDS: dict[str, type[Recipe]] = {
    "classification": ClassificationRecipe,
    "detection": DetectionRecipe,
    "language": LanguageRecipe,
    "segmentation": SegmentationRecipe,
}


def override(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """Apply ``key=value`` assignments; ``model.args.widths=[24,34,48]`` reaches inside.

    Values are JSON, or else plain text.

    Raises:
        UserError: no ``=``, an unknown key, or a value of another type.
    """
    values = json.loads(json.dumps(dataclasses.asdict(recipe)))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"override: got {assignment!r}, expected key=value")
        *parents, last = key.split(".")
        place, path = values, ""
        for part in parents:
            if not isinstance(place.get(part), dict):
                raise UserError(_unknown(key, _keys(values)))
            place, path = place[part], f"{path}{part}."
        if last not in place and not path.endswith("args."):  # args are the model's own
            raise UserError(_unknown(key, _keys(values)))
        try:
            place[last] = json.loads(text)
        except json.JSONDecodeError:
            place[last] = text
    return _typed(values, "override")


def read_recipe(path: Path) -> Recipe:
    """A recipe from a YAML file, such as a run's ``config.yaml``.

    Raises:
        UserError: the file cannot be read, is no YAML, or has a wrong key or value.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"recipe: cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe: got {type(values).__name__} in {path}, expected a mapping of keys to values")
    task = values.setdefault("task", "classification")
    if task not in KINDS:
        raise UserError(f"{path}: task: got {task!r}, expected one of {', '.join(KINDS)}{nearest(str(task), KINDS)}")
    for key in values:
        if key not in KINDS[task].__dataclass_fields__:
            raise UserError(f"{path}: {_unknown(str(key), KINDS[task].__dataclass_fields__)}")
    return _typed(values, str(path))


def to_yaml(recipe: Recipe) -> str:
    import yaml

    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))  # tuples become lists
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _typed(values: Mapping[str, Any], where: str) -> Recipe:
    import pydantic

    try:
        # strict, but by the rules of JSON: a list may fill a tuple, and a whole number a float
        return pydantic.TypeAdapter(KINDS.get(values["task"], Recipe)).validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Input should be ")
        raise UserError(f"{where}: {key}: got {first['input']!r}, expected {message}") from None


def _keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _keys(value, f"{prefix}{key}.")
    return found


def _unknown(key: str, known) -> str:
    return f"unknown key {key!r}, expected one of a recipe's{nearest(key, known)}"
