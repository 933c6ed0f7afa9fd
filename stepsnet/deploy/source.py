"""What is exported: a run's model, a named one or one in memory, with what its users need to know about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import UserError, import_extra, in_a_line
from ..models.backbone import PyramidBackbone, create_backbone, load_backbone
from ..models.blocks import is_transformer_in_steps
from ..models.build import DETECTORS, build_model, input_size_of, is_elsewhere
from ..models.compilation import restore_forward
from ..models.trained import trained_model
from ..models.transfer import read_pretrained
from ..models.windows import restore_windows
from ..run_folder.checkpoint import load_into
from ..run_folder.folder import CONFIG, on_unfinished, read_run_recipe
from ..settings.config import ClassificationRecipe, ModelSpec
from ..tasks import describe_deployment
from ..tasks.deployment import Deployment, of_tokens
from .capture import flat_outputs, other_picture_sizes
from .preprocessing import channels_of, of_model, stated, unknown
from .samples import photographs, words

__all__ = ["Source", "described", "find_source"]


@dataclass(frozen=True)
class Source:
    """A model in evaluation mode on the CPU, a function of one tensor."""

    name: str  # of the file that is written, if no path is given
    model_name: str
    model: nn.Module
    use: Deployment
    trained: bool  # False: its weights are random
    notes: tuple[str, ...] = field(default=())  # what its users are told, since they cannot know it

    def inputs(self, count: int, shape: Sequence[int]) -> Tensor:
        """Real inputs of a shape, each different from the others."""
        if self.use.axes[1] == "tokens":
            vocabulary = cast(Any, self.model).config.vocab_size
            tokenizer = self.use.tokenizer
            encode = _encoder(tokenizer) if tokenizer else lambda text: [code % vocabulary for code in text.encode()]
            return words(count, shape[0], encode)
        mean, std = (self.use.preprocessing.get(name) or (0.5,) for name in ("mean", "std"))
        return photographs(count, shape, mean, std)

    @property
    def other_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Other sample shapes that the model takes, the one to capture it with first; empty if it takes no other."""
        if self.use.axes[1] == "tokens":
            return ((self.use.shape[0] // 2 + 1,),)
        return other_picture_sizes(self.model, self.use.shape)


class LanguageModel(nn.Module):
    """Token ids (B, N) -> logits (B, N, vocabulary), without a cache."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def find_source(
    given: str | Path | nn.Module,
    *,
    features: bool = False,
    weights: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    fixed_size: bool = False,
) -> Source:
    """Find what to export: the model of a run's folder, one that timm or stepsnet knows by name, or a module.

    Args:
        features: the four feature maps of a classifier's backbone in place of its logits, as dense tasks use them:
            those of a Swin, a ViT, a DeiT or an EVA pass through a LayerNorm that is not trained, and maps that all
            have one stride are resampled to the strides 4 to 32.
        weights: with a name: a file of weights, a run, or ``timm:NAME``.
        model_args: with a name: the model's arguments.
        about: with a name or a module: input_size, mean, std and classes, in place of what the model states.
        fixed_size: with ``features``, the backbone may take pictures of one size only.

    Raises:
        UserError: there is no such run or model, it has no weights, or it is of a kind that cannot be exported.
    """
    is_run = isinstance(given, (str, Path)) and Path(given).is_dir()
    model_args = dict(model_args or {})
    about = {name: value for name, value in (about or {}).items() if value is not None}
    if not isinstance(given, (str, Path, nn.Module)):
        raise UserError(f"export: got a {type(given).__name__}, expected a run, the name of a model or a module")
    if is_run or isinstance(given, nn.Module):
        what = [*model_args, *(["weights"] if weights else []), *(about if is_run else ())]
        if what:
            raise UserError(
                f"export: got {', '.join(what)} beside {given if is_run else 'a module'}, which has its own"
            )
    if is_run:
        assert isinstance(given, (str, Path))
        return _of_run(Path(given), features, fixed_size)
    if isinstance(given, nn.Module):
        if features:
            raise UserError("export: got features beside a module, expected a run or the name of a model")
        source = _of_module(given, about.get("input_size"))
    else:
        source = _of_name(str(given), features, weights, model_args, fixed_size)
    return _with_stated(source, about) if about else source


def _of_run(run: Path, features: bool, fixed_size: bool) -> Source:
    recipe = read_run_recipe(run)
    _refuse_detector(recipe.model.name, features)
    name, notes = run.resolve().name, tuple(on_unfinished(run))
    if not features:
        model = trained_model(run, recipe)
        use = describe_deployment(run, recipe, model)
        is_language = use.axes[1] == "tokens"
        return Source(name, recipe.model.name, LanguageModel(model) if is_language else model, use, True, notes)
    if not isinstance(recipe, ClassificationRecipe):
        raise UserError(f"--features: {run} is a run of {recipe.task}, expected one of classification")
    model = trained_model(run, recipe)
    use = describe_deployment(run, recipe, model)
    args = {key: value for key, value in recipe.model.args.items() if key not in ("num_classes", "pretrained")}
    backbone = _backbone(recipe.model.name, args, fixed_size)
    load_backbone(backbone, run)
    maps = _of_maps(use.shape, use.preprocessing)
    return Source(f"{name}-features", recipe.model.name, backbone, maps, True, notes)


def _of_name(name: str, features: bool, weights: str | Path | None, args: dict[str, Any], fixed_size: bool) -> Source:
    _refuse_detector(name, features)
    if not is_elsewhere(name) and ("/" in name or name.endswith((".yaml", ".json", ".safetensors"))):
        raise UserError(f"export: {name} is not a folder, expected the folder of a run, or the name of a model")
    model = build_model(ModelSpec(name, args))
    backbone = _backbone(name, args, fixed_size) if features else None
    if weights and backbone is not None:
        load_backbone(backbone, weights, "--weights")
    elif weights:
        load_into(model, read_pretrained(weights, "--weights"))
    source = _with_weights(described(name, model, bool(weights or args.get("pretrained")), args), weights, features)
    if backbone is None:
        return source
    use = _of_maps(source.use.shape, source.use.preprocessing)
    return replace(source, name=f"{name}-features", model=backbone, use=use)


def _with_weights(source: Source, weights: str | Path | None, features: bool) -> Source:
    """The source of a named model, with what is known about the weights loaded into it."""
    if weights is None:
        return source
    if Path(weights).is_dir() and (Path(weights) / CONFIG).exists():
        run = Path(weights)
        model = source.model.model if isinstance(source.model, LanguageModel) else source.model
        recipe = read_run_recipe(run)
        if features:  # these have no classes, so the run's may be others than the model's
            model = build_model(recipe.model, pretrained=False)
        return replace(source, use=describe_deployment(run, recipe, model), notes=tuple(on_unfinished(run)))
    if source.use.axes[1] == "tokens":
        return source
    if (tag := str(weights)).startswith("timm:"):
        preprocessing, notes = of_model(source.model, source.use.shape[0], tag.removeprefix("timm:"))
        preprocessing["input_size"] = source.use.shape
        return replace(source, use=replace(source.use, preprocessing=preprocessing), notes=tuple(notes))
    line = f"{weights} does not say how pictures are preprocessed: the metadata state {source.model_name}'s default"
    return replace(source, notes=(*source.notes, line))


def _of_module(model: nn.Module, input_size: Sequence[int] | None) -> Source:
    model = getattr(model, "_orig_mod", model)  # the model that torch.compile has wrapped
    config = getattr(model, "pretrained_cfg", None) or {}
    name = str(config.get("architecture") or type(model).__name__.lower())
    args: dict[str, Any] = {}
    if input_size is not None:
        channels, *sides = stated(input_size, input_size)[0]
        args = {"in_chans": channels, "img_size": tuple(sides)}
    plain = copy.deepcopy(model).cpu()
    for parameter in plain.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            got = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"export: the module has weights of {got}, expected float32, as module.float() makes them")
    restore_forward(plain)  # what optimize has put there is for this machine, and no exporter takes it
    restore_windows(plain)
    return described(name, plain, True, args, states_inputs=bool(config))


def described(name: str, model: nn.Module, trained: bool, args: dict[str, Any], states_inputs: bool = True) -> Source:
    """The source of a model that :func:`~stepsnet.models.build.build_model` made with ``args``, or of a user's own.

    Args:
        states_inputs: False for a module that states nothing about its inputs.
    """
    model = model.eval()
    if is_transformer_in_steps(model):
        return Source(name, name, LanguageModel(model), of_tokens(model), trained)
    if hasattr(model, "generate"):
        expected = "expected one that is (for others there are transformers' exporters)"
        raise UserError(f"export: {name} is a language model that is not in steps, {expected}")
    size = input_size_of(ModelSpec(name, args), model)
    channels = size[0] if "in_chans" in args else channels_of(model, size)
    shape = (channels, *size[1:])
    preprocessing, notes = of_model(model, channels) if states_inputs else (unknown(channels), [])
    if not states_inputs:
        notes = [
            f"{name} does not say how pictures are preprocessed: this is null in the metadata (stepsnet.export takes "
            "input_size=, mean=, std= and classes=)"
        ]
    preprocessing["input_size"] = shape
    if args.get("features_only"):
        return Source(name, name, model, _of_maps(shape, preprocessing), trained, tuple(notes))
    task = "segmentation" if hasattr(model, "decode_head") else "classification"
    outputs = ("logits",) if getattr(model, "num_classes", 1) else ("features",)
    use = Deployment(task=task, shape=shape, outputs=outputs, preprocessing=preprocessing, classes=_label_names(model))
    return Source(name, name, model, use, trained, tuple(notes))


def _label_names(model: nn.Module) -> list[str] | None:
    """The class names in timm's pretrained config; None if it has none, or not as many as the model has classes."""
    labels = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    if not isinstance(labels, (list, tuple)) or len(labels) != getattr(model, "num_classes", 0):
        return None
    return list(labels)


def _with_stated(source: Source, about: dict[str, Any]) -> Source:
    """The source with what the caller states in ``about``. Raises UserError if that does not fit the model."""
    use, classes = source.use, about.pop("classes", None)
    if use.axes[1] == "tokens":
        raise UserError(f"export: got {', '.join([*about, 'classes'][:1])} beside a language model, which takes tokens")
    shape, said = stated(use.shape, **about)
    if classes is not None:
        if isinstance(classes, str) or not isinstance(classes, Sequence):
            raise UserError(f"classes: got {classes!r}, expected a list of names, one for each output")
        expected = _classes_of(source, shape)
        if expected is not None and len(classes) != expected:
            raise UserError(f"classes: got {len(classes)}, expected {expected} names, one for each output")
    use = replace(
        use,
        shape=shape,
        preprocessing={**use.preprocessing, **said, "input_size": shape},
        classes=use.classes if classes is None else list(classes),
    )
    return replace(source, use=use, notes=() if {"mean", "std"} <= said.keys() else source.notes)


def _classes_of(source: Source, shape: tuple[int, ...]) -> int | None:
    """The number of a model's classes, from its output if it does not state it; None if it is not a classifier."""
    if isinstance(number := getattr(source.model, "num_classes", None), int):
        return number
    with torch.inference_mode():
        found = flat_outputs(source.model(source.inputs(1, shape)))
    return found[0].shape[1] if len(found) == 1 and found[0].ndim > 1 else None


def _encoder(tokenizer: str) -> Callable[[str], list[int]]:
    made = import_extra("tokenizers").Tokenizer.from_str(tokenizer)
    return lambda text: made.encode(text, add_special_tokens=False).ids


def _of_maps(shape: tuple[int, ...], preprocessing: dict[str, Any]) -> Deployment:
    return Deployment(task="features", shape=shape, outputs=(), preprocessing={**preprocessing, "input_size": shape})


def _backbone(name: str, args: dict[str, Any], fixed_size: bool) -> PyramidBackbone:
    try:
        return create_backbone(name, any_size=not fixed_size, **args).eval()
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise UserError(f"--features: {in_a_line(error)}") from None


def _refuse_detector(name: str, features: bool) -> None:
    if name in DETECTORS:
        others = "a classifier, a segmenter or, with --features, a backbone"
        expected = "a classifier's backbone" if features else others
        raise UserError(
            f"export: {name} is a detector, whose lists of objects differ in length from image to image, expected "
            f"{expected}"
        )
