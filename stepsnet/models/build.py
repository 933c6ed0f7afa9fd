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

from ..config import ModelSpec
from ..errors import UserError, in_a_line, nearest, place_in_user_code
from ..machine import host_memory
from ..plan import MOST_BLOCKS

__all__ = [
    "DETECTORS",
    "build_model",
    "check_model_name",
    "context_of",
    "fit_positions",
    "input_size_of",
    "is_elsewhere",
]

_LARGE = 1024  # a size from which on weights may take more memory than there is
_DEPTHS = ("depth", "depths", "layers", "num_layers", "num_hidden_layers", "stage_depths")
_WHOLE = ("in_chans", "num_classes", "img_size", "patch_size", "embed_dim", *_DEPTHS)
_LEAST = dict.fromkeys(("in_chans", "img_size", "patch_size", "channels", "hidden", "samples", "anchors"), 1.0)
_LEAST |= {"num_classes": 0, "mlp_ratio": 0.01}
_NOT_OF_A_CLASSIFIER = {
    "features_only": "detectors and segmenters take the features of a classifier by themselves",
    "checkpoint_path": "init=FILE reads weights",
}
# Models that are not registered with timm: the function `create` of the module with that name in stepsnet.models.
DETECTORS = {"mask_rcnn": True, "cascade_mask_rcnn": True, "faster_rcnn": False, "cascade_rcnn": False}  # has masks
_MASKLESS = {"faster_rcnn": "mask_rcnn", "cascade_rcnn": "cascade_mask_rcnn"}  # in the module of the one with masks
NOT_IN_TIMM = ("steps_transformer", "causal_lm", "stepify", "grow", "upernet", *DETECTORS)


def build_model(spec: ModelSpec, pretrained: bool = True) -> nn.Module:
    """Build the model that a recipe names, with random weights or those that its arguments ask for.

    Args:
        pretrained: False for a model that gets its weights from elsewhere, as a run's does, or needs none: then the
            argument ``pretrained`` fetches nothing.

    Raises:
        UserError: an unknown name, arguments that the model does not accept, or weights that the machine's memory does
            not hold.
    """
    if not pretrained:
        spec = ModelSpec(spec.name, _not_pretrained(spec.args))
    check_model_name(spec)
    check_args(spec)
    if any(abs(number) >= _LARGE for value in spec.args.values() for number in _numbers(value)):
        _check_memory(spec)
    return _build(spec)


def _not_pretrained(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model, and of a model inside of it, without ``pretrained``."""
    inside = {key: _not_pretrained(value) if isinstance(value, Mapping) else value for key, value in args.items()}
    return {key: value for key, value in inside.items() if key != "pretrained"}


def _check_memory(spec: ModelSpec) -> None:
    try:
        with torch.device("meta"):
            model = _build(spec)
    except UserError:  # perhaps a model that needs numbers while it is built
        return
    needed = sum(tensor.nbytes for tensor in model.parameters())
    if needed > host_memory():
        raise UserError(
            f"model {spec.name}: its weights take {needed / 2**30:,.0f} GiB, expected at most the "
            f"{host_memory() / 2**30:.0f} GiB of memory"
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
    except Exception as error:  # whatever timm, torch and transformers raise of arguments that they do not take
        said = in_a_line(error.__cause__ or error)
        if unknown := re.fullmatch(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'.*", said):
            raise UserError(_unknown_argument(spec, unknown[2], unknown[1])) from error
        if where := place_in_user_code(error):
            raise UserError(f"model {spec.name}: {where}: {said}") from error
        # a library's message may quote a value alone
        values = {key: rf"(?<!\w){re.escape(repr(value))}(?!\w)" for key, value in spec.args.items() if key not in said}
        is_named = len(values) < len(spec.args)  # then another number in it is not of these
        quoted = [f"{key}={spec.args[key]!r}" for key in values if not is_named and re.search(values[key], said)]
        raise UserError(f"model {spec.name}: {said}{f' ({quoted[0]})' if len(quoted) == 1 else ''}") from error
    for kind in type(model).__mro__[:-1]:
        for name, parameter in inspect.signature(kind).parameters.items():
            value = spec.args.get(name)
            if parameter.annotation in (bool, "bool") and value is not None and not isinstance(value, bool):
                raise UserError(f"model {spec.name}: {name}: got {str(value)[:40]}, expected true or false")
    return model


def _unknown_argument(spec: ModelSpec, name: str, callee: str) -> str:
    """What is said of an argument that a constructor does not know, with the nearest that it does."""
    if name not in spec.args:  # of a model inside of this one
        return f"model {spec.name}: got an unknown argument {name!r}, expected one of {callee}"
    others = {key: value for key, value in spec.args.items() if key != name}
    try:
        with torch.device("meta"):
            kinds = type(_build(ModelSpec(spec.name, others))).__mro__[:-1]
    except UserError:  # another one is wrong too, or the model needs numbers while it is built
        kinds = ()
    known = {parameter for kind in kinds for parameter in inspect.signature(kind).parameters}
    got = f"got an unknown argument {name!r} ({str(spec.args[name])[:40]})"
    return f"model {spec.name}: {got}, expected one of {callee}{nearest(name, sorted(known))}"


def check_args(spec: ModelSpec) -> None:
    """Find arguments that models take without a word, or that keep them from ever being built.

    Raises:
        UserError: a rate outside of [0, 1), no block or more than :data:`MOST_BLOCKS`, or an argument of
            ``timm.create_model`` with which no classifier is made, or weights are read that are not the recipe's.
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
    """The numbers in an argument, which may be one, or a list of numbers or lists."""
    if isinstance(value, list | tuple):
        return [number for one in value for number in _numbers(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check_model_name(spec: ModelSpec) -> None:
    """Raises UserError, with the nearest names, for a model that does not exist."""
    if spec.name not in NOT_IN_TIMM and not timm.is_model(spec.name) and not is_elsewhere(spec.name):
        known = [*NOT_IN_TIMM, *timm.list_models()]
        raise UserError(f"model: got {spec.name!r}, expected a timm or StepsNet model{nearest(spec.name, known)}")


def is_elsewhere(name: str) -> bool:
    """Whether it names a model of a folder or of the Hub by timm's ``local-dir:`` or ``hf-hub:``."""
    return name.partition(":")[0] in ("local-dir", "hf-hub", "hf_hub") and ":" in name


def context_of(model: Any) -> int | None:
    """The tokens that a language model of transformers has positions for; None for one without, such as Mamba.

    A table of positions with a row for padding, as RoBERTa has it, is read from the row behind that one.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None or getattr(model.config, "rope_parameters", None) is not None:
        return most
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # of a user's model, which need not say
        words = None
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding) and part is not words)
    padding = (table.padding_idx for table in tables if table.num_embeddings == most)
    return most - next((row + 1 for row in padding if row is not None), 0)


def fit_positions(model: Any, seq_len: int) -> None:
    """Let a config say the length that its model is trained at, as where rotary positions go on beyond the config's.

    What is published would be cut to the shorter length by those who read it. Scaled rotary positions keep theirs,
    which their formula has.

    Raises:
        UserError: the positions are learned, and fewer than a sequence's.
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
    # a model without such a patch embedding may be built for a size too, which its config does not tell
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None) or spec.args.get("img_size")
    if built_for:
        height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    return spec.args.get("in_chans", chans), height, width
