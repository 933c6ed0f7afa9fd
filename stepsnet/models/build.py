"""Build a model from its name and arguments: image classifiers of timm or stepsnet, and models of other tasks."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

from ..errors import UserError, in_a_line, nearest, place_in_user_code
from ..machine import host_memory
from ..plan import MOST_BLOCKS
from ..settings.config import ModelSpec

__all__ = [
    "DETECTORS",
    "build_model",
    "check_model_name",
    "context_of",
    "fit_positions",
    "input_size_of",
    "is_elsewhere",
]

_LARGE = 1024  # from this size on, weights may take more memory than there is
_DEPTHS = ("depth", "depths", "layers", "num_layers", "num_hidden_layers", "stage_depths")
_WHOLE = ("in_chans", "num_classes", "img_size", "patch_size", "embed_dim", *_DEPTHS)
_LEAST = dict.fromkeys(("in_chans", "img_size", "patch_size", "channels", "hidden", "samples", "anchors"), 1.0)
_LEAST |= {"num_classes": 0, "mlp_ratio": 0.01}
_NOT_OF_A_CLASSIFIER = {
    "features_only": "detectors and segmenters take the features of a classifier by themselves",
    "checkpoint_path": "init=FILE reads weights",
}
# Models that are not registered with timm are made by `create` in the module of that name in stepsnet.models.
DETECTORS = {"mask_rcnn": True, "cascade_mask_rcnn": True, "faster_rcnn": False, "cascade_rcnn": False}  # has masks
_MASKLESS = {"faster_rcnn": "mask_rcnn", "cascade_rcnn": "cascade_mask_rcnn"}  # in the module of the one with masks
NOT_IN_TIMM = ("steps_transformer", "causal_lm", "stepify", "grow", "upernet", *DETECTORS)


def build_model(spec: ModelSpec, pretrained: bool = True) -> nn.Module:
    """Build the model that a recipe names, with random weights or those that its arguments ask for.

    Args:
        pretrained: False for a model that gets its weights from elsewhere, as a run's does, or needs none; the
            model's own argument ``pretrained`` is then ignored, and nothing is fetched.

    Raises:
        UserError: an unknown name, arguments that the model does not accept, or weights that do not fit into the
            machine's memory.
    """
    if not pretrained:
        spec = ModelSpec(spec.name, _not_pretrained(spec.args))
    check_model_name(spec)
    check_args(spec)
    if any(abs(number) >= _LARGE for value in spec.args.values() for number in _numbers(value)):
        _check_memory(spec)
    return _build(spec)


def _not_pretrained(args: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arguments, and those of any model inside it, without ``pretrained``."""
    inside = {key: _not_pretrained(value) if isinstance(value, Mapping) else value for key, value in args.items()}
    return {key: value for key, value in inside.items() if key != "pretrained"}


def _check_memory(spec: ModelSpec) -> None:
    try:
        with torch.device("meta"):
            model = _build(spec)
    except UserError:  # perhaps a model that needs actual values while it is built
        return
    needed = sum(tensor.nbytes for tensor in model.parameters())
    if needed > host_memory():
        raise UserError(
            f"model {spec.name}: its weights take {needed / 2**30:,.0f} GiB, expected at most the "
            f"{host_memory() / 2**30:.0f} GiB of this machine"
        )


def _build(spec: ModelSpec) -> nn.Module:
    try:
        if spec.name in NOT_IN_TIMM:
            module = importlib.import_module(f"stepsnet.models.{_MASKLESS.get(spec.name, spec.name)}")
            masks = {"masks": DETECTORS[spec.name]} if spec.name in DETECTORS else {}
            model = module.create(**spec.args, **masks)
        else:
            model = timm.create_model(spec.name, **spec.args)
    except UserError:
        raise
    except Exception as error:  # whatever timm, torch and transformers raise for arguments that they reject
        said = in_a_line(error.__cause__ or error)
        if unknown := re.fullmatch(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'.*", said):
            raise UserError(_unknown_argument(spec, unknown[2], unknown[1])) from error
        if where := place_in_user_code(error):
            raise UserError(f"model {spec.name}: {where}: {said}") from error
        # a library's message may quote a value without its name
        values = {key: rf"(?<!\w){re.escape(repr(value))}(?!\w)" for key, value in spec.args.items() if key not in said}
        is_named = len(values) < len(spec.args)  # then the message is about that one
        quoted = [f"{key}={spec.args[key]!r}" for key in values if not is_named and re.search(values[key], said)]
        raise UserError(f"model {spec.name}: {said}{f' ({quoted[0]})' if len(quoted) == 1 else ''}") from error
    for kind in type(model).__mro__[:-1]:
        for name, parameter in inspect.signature(kind).parameters.items():
            value = spec.args.get(name)
            if parameter.annotation in (bool, "bool") and value is not None and not isinstance(value, bool):
                raise UserError(f"model {spec.name}: {name}: got {str(value)[:40]}, expected true or false")
    return model


def _unknown_argument(spec: ModelSpec, name: str, callee: str) -> str:
    """The message about an argument that a constructor does not know, with the nearest one that it does."""
    if name not in spec.args:  # it belongs to a model inside this one
        return f"model {spec.name}: got an unknown argument {name!r}, expected an argument of {callee}"
    others = {key: value for key, value in spec.args.items() if key != name}
    try:
        with torch.device("meta"):
            kinds = type(_build(ModelSpec(spec.name, others))).__mro__[:-1]
    except UserError:  # another one is wrong too, or the model needs actual values while it is built
        kinds = ()
    known = {parameter for kind in kinds for parameter in inspect.signature(kind).parameters}
    got = f"got an unknown argument {name!r} ({str(spec.args[name])[:40]})"
    return f"model {spec.name}: {got}, expected an argument of {callee}{nearest(name, sorted(known))}"


def check_args(spec: ModelSpec) -> None:
    """Refuse arguments that models would accept without a word, or that would keep them from ever being built.

    Raises:
        UserError: a rate outside [0, 1), a number that is too small or not whole, no block or more than
            :data:`MOST_BLOCKS`, or an argument of ``timm.create_model`` that makes something other than a classifier
            or reads weights other than the recipe's.
    """
    for name, value in spec.args.items():
        got = f"model {spec.name}: {name}: got {str(value)[:40]}"
        if name in _NOT_OF_A_CLASSIFIER and value:
            raise UserError(f"{got}, expected none: {_NOT_OF_A_CLASSIFIER[name]}")
        numbers = _numbers(value)
        if (
            name in _WHOLE
            and value is not None
            and (isinstance(value, str) or not all(isinstance(one, int) for one in numbers))
        ):
            raise UserError(f"{got}, expected a whole number")
        if name.endswith(("_rate", "_dropout")) and not all(0 <= number < 1 for number in numbers):
            raise UserError(f"{got}, expected at least 0 and less than 1")
        if name in _LEAST and not all(number >= _LEAST[name] for number in numbers):
            raise UserError(f"{got}, expected at least {_LEAST[name]:g}")
        if name in _DEPTHS and numbers and not 1 <= sum(numbers) <= MOST_BLOCKS:
            raise UserError(f"{got}, expected 1 to {MOST_BLOCKS:,} blocks")


def _numbers(value: object) -> list[float]:
    """The numbers in an argument, which may be a single one, or a list of numbers or lists."""
    if isinstance(value, list | tuple):
        return [number for one in value for number in _numbers(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check_model_name(spec: ModelSpec) -> None:
    """Raise UserError, with the nearest names, if there is no such model."""
    if spec.name not in NOT_IN_TIMM and not timm.is_model(spec.name) and not is_elsewhere(spec.name):
        known = [*NOT_IN_TIMM, *timm.list_models()]
        raise UserError(f"model: got {spec.name!r}, expected a timm or StepsNet model{nearest(spec.name, known)}")


def is_elsewhere(name: str) -> bool:
    """Whether the name is that of a model in a folder or on the Hub, by timm's ``local-dir:`` or ``hf-hub:``."""
    return name.partition(":")[0] in ("local-dir", "hf-hub", "hf_hub") and ":" in name


def context_of(model: Any) -> int | None:
    """How many tokens a transformers language model has positions for; None for one without, such as Mamba.

    A position table with a row for padding, such as RoBERTa's, is only used from the row after that one.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None or getattr(model.config, "rope_parameters", None) is not None:
        return most
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # a user's model need not say
        words = None
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding) and part is not words)
    padding = (table.padding_idx for table in tables if table.num_embeddings == most)
    return most - next((row + 1 for row in padding if row is not None), 0)


def fit_positions(model: Any, seq_len: int) -> None:
    """Raise the length in a model's config to the one that it is trained at, if its rotary positions go that far.

    Programs that read a published config would otherwise cut texts to the shorter length. Scaled rotary positions keep
    the length in the config, since it is part of their formula.

    Raises:
        UserError: the positions are learned, and there are fewer than ``seq_len``.
    """
    most, rotary = context_of(model), getattr(model.config, "rope_parameters", None)
    if most is None or most >= seq_len:
        return
    if rotary is None:
        raise UserError(f"seq_len: got {seq_len}, expected at most the model's {most} positions")
    kinds = rotary.values() if all(isinstance(each, dict) for each in rotary.values()) else [rotary]
    if all(each.get("rope_type", "default") == "default" for each in kinds):
        model.config.max_position_embeddings = seq_len


def input_size_of(spec: ModelSpec, model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the images that a built model takes."""
    chans, height, width = resolve_model_data_config(model)["input_size"]
    # a model without such a patch embedding may also be built for a size, which its config does not tell
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None) or spec.args.get("img_size")
    if built_for:
        height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    return spec.args.get("in_chans", chans), height, width
