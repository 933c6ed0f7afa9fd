"""A model of transformers as a StepsNet: the library's own layers, built from its configuration at several widths."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from ...errors import UserError, in_a_line, nearest
from ..transformers_families import FAMILIES, head_size_of, layer_of, steps_class, steps_config_class
from .adapters import BlockAdapter
from .containers import Container, trace_blocks
from .differences import PLAIN, period_of, signature_of
from .example import Example
from .plan import ContainerPlan
from .roles import get_path

__all__ = [
    "built_like",
    "check_layers",
    "check_outside",
    "in_steps",
    "layers_of_transformer",
    "model_of_name",
    "set_types",
    "steps_config_of",
    "take_weights",
    "token_example",
]

_ARGUMENTS = ("num_labels", "attn_implementation")  # what a configuration takes besides its fields


def model_of_name(name: str, args: dict[str, Any]) -> nn.Module:
    """A model with random weights, from a configuration in a folder or on the Hub; ``args`` change its fields.

    Raises:
        UserError: there is no such configuration, it has no such field or refuses its value, or it does not name the
            class of its model.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)  # else it may prompt for it
        config = _changed(config, args) if args else config
    except (OSError, ValueError, TypeError, StrictDataclassError, AttributeError) as error:  # the last for a bad dtype
        raise UserError(f"model: transformers:{name}: {in_a_line(error.__cause__ or error)[:200]}") from error
    made_for = config.architectures or [""]
    model_class = getattr(transformers, made_for[0], None)
    if model_class is None:
        raise UserError(f"model: transformers:{name} has architectures={made_for}, expected a class of transformers")
    try:
        return model_class(config)
    except (ImportError, ValueError) as error:  # an attention that is not installed
        raise UserError(f"model: transformers:{name}: {in_a_line(error)[:200]}") from error


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """A configuration with some fields changed, along with those that follow from them, such as ``head_dim``.

    Raises:
        UserError: a field that it does not have.
        ValueError, TypeError: a value that it does not take.
    """
    fields, other_names = config.to_dict(), {**config.attribute_map, "torch_dtype": "dtype"}
    known = {*fields, *other_names, "dtype", *_ARGUMENTS}
    if unknown := next((name for name in changes if name not in known), None):
        inside = next((key for key, value in fields.items() if isinstance(value, dict) and unknown in value), None)
        hint = f" (it is part of {inside})" if inside else nearest(unknown, sorted(known))
        raise UserError(f"{unknown}: got {changes[unknown]!r}, expected a field of {type(config).__name__}{hint}")
    arguments = {name: changes[name] for name in changes if name in _ARGUMENTS}
    changes = {other_names.get(name, name): value for name, value in changes.items() if name not in arguments}

    def follow(names: Collection[str]) -> bool:
        """Whether the class derives these fields, too, from the others."""
        others = {name: value for name, value in fields.items() if name not in names}
        try:
            return type(config).from_dict(others).to_dict() == fields
        except (ValueError, TypeError, StrictDataclassError):  # its own default does not go with the others
            return False

    left = {name for name in fields if name not in changes and follow({name})}
    if not follow(left):  # two of them follow from each other
        left = set()
    kept = {name: fields[name] for name in fields.keys() - left}
    return type(config).from_dict({**kept, **changes}, **arguments)


def token_example(model: Any, tokens: int, whole_mask: bool = True) -> Example:
    """One sequence of ``tokens`` tokens on the meta device.

    Args:
        whole_mask: whether to pass a full attention mask, since most families look at data when they make one.
    """
    kwargs: dict[str, Any] = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64, device="meta")}
    if hasattr(model.config, "use_cache"):
        kwargs["use_cache"] = False
    if _chooses(model):
        return Example((), kwargs | {"input_ids": kwargs["input_ids"][None]})  # (1, one choice, tokens)
    if whole_mask and hasattr(model.config, "num_attention_heads"):
        kwargs["attention_mask"] = torch.zeros(1, 1, tokens, tokens, device="meta")
    return Example((), kwargs)


def _chooses(model: Any) -> bool:
    """Whether a model has a head for multiple choice, which flattens choices into rows, and a mask with them."""
    return bool({base.__name__ for base in type(model).__mro__} & {*MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()})


def layers_of_transformer(model: Any, example: Example) -> Container:
    """The layers of a model whose family is in the table of transformers_families.py.

    Raises:
        UserError: another family, a model that is in steps already or has cross-attention, or as :func:`check_layers`.
    """
    config = model.config
    name = config.model_type
    if name.startswith("steps_"):
        raise UserError(f"stepify: {type(model).__name__} is in steps already, expected a plain model")
    if name not in FAMILIES:
        inside = "; its timm_model can be put in steps" if hasattr(model, "timm_model") else ""
        raise UserError(
            f"stepify: {type(model).__name__} is of the family {name!r}, expected one of {', '.join(FAMILIES)}{inside}"
            "; a row in stepsnet/models/transformers_families.py adds another"
        )
    if getattr(config, "add_cross_attention", False):
        raise UserError(f"stepify: {type(model).__name__} has add_cross_attention, expected a model without it")
    family = FAMILIES[name]
    layers = list(get_path(model.base_model, family.layers))
    check_layers(model, layers, family.layers)
    heads = getattr(config, "num_attention_heads", None)
    adapter = BlockAdapter(
        rebuild=lambda layer, width, heads: layer_of(name, config, family.sizes(config, width, heads), 0),
        num_heads=lambda layer: heads,
        head_rule=lambda layer: family.head_rule,
        head_size=lambda layer: head_size_of(config),
        kv_groups=lambda layer: _heads_per_group(config),
        dim=-1,
    )
    call = trace_blocks(model, layers[:1], example)[layers[0]]
    path = next(path for path, module in model.named_modules() if module is get_path(model.base_model, family.layers))
    return Container(path, layers, adapter, 0, config.hidden_size, -1, Example(call.args, call.kwargs))


def check_layers(model: Any, layers: Sequence[nn.Module], path: str, caller: str = "stepify") -> Any:
    """Compare layers with those of the model as its configuration builds it; return that model, without values.

    Raises:
        UserError: a layer differs, so that new layers would be built without the change.
    """
    try:
        with torch.device("meta"):
            again = type(model)(copy.deepcopy(model.config))
    except TypeError as error:
        raise UserError(
            f"{caller}: {type(model).__name__} cannot be built from model.config alone ({in_a_line(error)[:200]}), "
            "expected a model that transformers builds"
        ) from error
    expected = get_path(again.base_model, path)
    if len(expected) != len(layers):
        raise UserError(
            f"{caller}: {type(model).__name__} has {len(layers)} layers, expected {len(expected)}, as model.config says"
        )
    for index, (ours, theirs) in enumerate(zip(map(_built, expected), map(_built, layers))):
        for name in dict.fromkeys((*ours, *theirs)):
            if not _equal(ours.get(name), theirs.get(name)):
                raise UserError(
                    f"{caller}: {type(model).__name__}, layer {index}{name and f', {name}'}: got "
                    f"{_named(theirs.get(name))}, expected {_named(ours.get(name))}, as transformers builds it from "
                    "model.config"
                )
    return again


def check_outside(expected: Any, model: Any, layers: str, caller: str = "stepify") -> None:
    """Raises UserError if a model has other tensors outside of its layers than the one that its configuration makes.

    Tied tensors count as one, so tensors that are tied in only one of the two models differ as well.
    """
    ours, theirs = (_outside(one, layers) for one in (expected, model))
    different = [key for key in ours.keys() ^ theirs.keys()]
    different += [key for key in ours.keys() & theirs.keys() if ours[key].shape != theirs[key].shape]
    if different:
        raise UserError(
            f"{caller}: {type(model).__name__}.{sorted(different)[0]} is not as its configuration makes it, expected a "
            "model that transformers can build from model.config"
        )


def _built(layer: nn.Module) -> dict[str, Any]:
    """The class of each module of a layer, the shape of each parameter, and plain attributes, all by path."""
    found: dict[str, Any] = {path: type(module) for path, module in layer.named_modules()}
    found |= {path: parameter.shape for path, parameter in layer.named_parameters()}
    for path, _, attributes, _ in signature_of(layer):
        plain = {name: value for name, value in attributes.items() if isinstance(value, PLAIN)}
        own = {name: value for name, value in plain.items() if not name.startswith("_") and name not in _STATES}
        found |= {f"{path}.{name}".lstrip("."): value for name, value in own.items()}
    return found


def _equal(one: Any, other: Any) -> bool:
    return one == other and type(one) is type(other)


_STATES = {"gradient_checkpointing"}  # of a layer, which are not in its configuration


def _named(built: Any) -> str:
    if isinstance(built, torch.Size):
        return f"the shape {tuple(built)}"
    return built.__name__ if isinstance(built, type) else "nothing" if built is None else repr(built)


def in_steps(model: Any, container: Container, plan: ContainerPlan, stream_scale: float) -> nn.Module:
    """A new model of the Steps class, initialized by the library, with the given one's weights outside of the layers.

    With a single step of all layers, these keep their weights too; with a ``stream_scale`` of 1 it is a plain copy.

    Raises:
        UserError: the given model has other tensors outside of its layers than its configuration makes.
    """
    is_one_step = plan.is_of(container)
    if is_one_step and stream_scale == 1.0:
        return copy.deepcopy(model)
    result = built_like(model, steps_class(model.__class__), steps_config_of(model.config, plan, stream_scale))
    layers = get_path(result.base_model, FAMILIES[model.config.model_type].layers)
    for layer in layers:
        set_types(layer, container.blocks[-1])
    check_outside(result, model, container.path)
    ours, theirs = (_outside(one, container.path) for one in (result, model))
    for key, tensor in ours.items():
        tensor.data = theirs[key].detach().clone()
        tensor.requires_grad_(theirs[key].requires_grad)
    if is_one_step:
        for layer, old in zip(layers, container.blocks):
            take_weights(layer, old)
    return result


def built_like(model: Any, model_class: Any, config: Any) -> Any:
    """A new model, initialized by the library, with the settings that another has beside weights and configuration.

    These are its device and mode, how it generates and recomputes, and the dtype of its parameters. Buffers, such as
    rotary frequencies, keep their precision.
    """
    config._attn_implementation = model.config._attn_implementation
    parameter = next(model.parameters())
    with torch.device(parameter.device):
        result = model_class(config)
    for own in result.parameters():
        own.data = own.data.to(parameter.dtype)
    _recompute_like(result, model)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        result.generation_config = copy.deepcopy(generation)
    return result.train(model.training)


def take_weights(module: nn.Module, old: nn.Module) -> None:
    """Copy the weights of a module with the same parameters, in their dtypes; what is frozen there is frozen here."""
    set_types(module, old, frozen=True)
    module.load_state_dict(old.state_dict())


def set_types(module: nn.Module, old: nn.Module, frozen: bool = False) -> None:
    """Take over the dtypes of another module's parameters, of any shape; with ``frozen`` also their requires_grad."""
    for parameter, theirs in zip(module.parameters(), old.parameters()):
        parameter.data = parameter.data.to(theirs.dtype)
        if frozen:
            parameter.requires_grad_(theirs.requires_grad)


def _recompute_like(result: Any, model: Any) -> None:
    """Enable gradient checkpointing if another model has it, with that model's options."""
    modules: list[Any] = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
    if modules:
        function = getattr(modules[0], "_gradient_checkpointing_func", None)  # a partial of torch's checkpoint
        result.gradient_checkpointing_enable(dict(getattr(function, "keywords", None) or {}) or None)


def _heads_per_group(config: Any) -> int:
    return config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def steps_config_of(
    config: Any, plan: ContainerPlan, stream_scale: float | None = None, norm_slices: list[int] | None = None
) -> Any:
    """The configuration of a family's model with its layers in these steps; all else as in ``config``.

    Args:
        config: that of a plain model, or of one whose steps the plan begins with.
        stream_scale: by default that of ``config``.
        norm_slices: those of the last norm of a grown model, whose first layers are those of ``config``.
    """
    name = config.model_type.removeprefix("steps_")
    fields = config.to_dict()
    layers = sum(plan.depths)
    for key in (
        "model_type",
        "architectures",
        "transformers_version",
        config.attribute_map.get("num_hidden_layers", ""),
    ):
        fields.pop(key, None)
    own = getattr(config, "layer_types", None)
    if own and "layer_types" in fields:
        is_grown = norm_slices is not None
        fields["layer_types"] = _default_types(config, layers) or _layer_types(own, layers, is_grown)
    there = getattr(config, "step_sizes", None) or []
    new = zip(plan.widths[len(there) :], plan.num_heads[len(there) :])
    sizes = [*there, *(FAMILIES[name].sizes(config, width, heads) for width, heads in new)]
    if max(plan.widths) != config.hidden_size:  # it has grown: the model's own sizes are those of its widest layers
        fields |= sizes[plan.widths.index(max(plan.widths))]
    scale = getattr(config, "stream_scale", 1.0) if stream_scale is None else float(stream_scale)
    steps = {"widths": list(plan.widths), "depths": list(plan.depths), "step_sizes": sizes}
    fields |= {**steps, "num_hidden_layers": layers, "stream_scale": scale, "norm_slices": norm_slices}
    return steps_config_class(name)(**fields)


def _default_types(config: Any, layers: int) -> list[str] | None:
    """The types that the configuration's class gives so many layers, if they repeat and begin with the model's own.

    A model that is no longer than the period, such as a Gemma 2 of two layers, does not show it by itself. The result
    is None otherwise, and for a model that lacks one of the types, since it lacks the parts for it too.
    """
    fields = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "model_type")}
    own, count = config.layer_types, 4 * max(layers, config.num_hidden_layers)
    try:
        found = list(type(config)(**{**fields, "num_hidden_layers": count}).layer_types)
    except Exception:  # the class needs more than its fields
        return None
    period = period_of(found)
    repeats = period is not None and 2 * period <= count
    return found[:layers] if repeats and found[: len(own)] == list(own) and {*found} == {*own} else None


def _layer_types(own: list[str], layers: int, is_grown: bool) -> list[str]:
    """The types of so many layers, such as full or sliding attention, in the period of the model's own.

    Without a period, the types keep their proportion or, if the model has grown, begin again.
    """
    period = period_of(own)
    if period is None and not is_grown:
        return [own[index * len(own) // layers] for index in range(layers)]
    return [own[index % (period or len(own))] for index in range(layers)]


def _outside(model: nn.Module, layers: str) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if not name.startswith(f"{layers}.")}
