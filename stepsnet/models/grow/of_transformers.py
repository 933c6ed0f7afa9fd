"""Language models of transformers as the first step of a wider StepsNet; convert.py says how their function is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UserError
from ...plan import StepPlan
from ..slice_norm import SliceNorm
from ..stepify.adapters import BlockAdapter
from ..stepify.containers import Container
from ..stepify.example import Example
from ..stepify.of_transformers import (
    built_like,
    check_layers,
    check_outside,
    set_types,
    steps_config_of,
    take_weights,
)
from ..stepify.plan import ContainerPlan
from ..stepify.roles import get_path
from ..steps_transformer import StepsTransformerConfig
from ..transformers_families import FAMILIES, Family, head_size_of, steps_class
from .new_weights import drawn_like, silence
from .plan import RoundTo, plan_growth

__all__ = ["grown_transformer"]

_GROWING = [name for name, row in FAMILIES.items() if row.outputs]


def grown_transformer(
    model: Any, steps: int | None, plan: Mapping[str, Any] | StepPlan | None, round_to: RoundTo
) -> nn.Module:
    """As :func:`stepsnet.grow`: a new model, initialized by the library, with the old weights put into it."""
    config, family = model.config, _family_of(model)
    ours = isinstance(config, StepsTransformerConfig)
    container, old = _container_of(model, family)
    new = plan_growth(container, old, steps, plan, round_to)
    slices = [*(getattr(config, "norm_slices", None) or [container.width]), new.widths[-1] - container.width]
    grown_config = _longer_lists(config, new, slices) if ours else steps_config_of(config, new, norm_slices=slices)
    model_class: Any = type(model) if hasattr(config, "widths") else steps_class(model.__class__)
    result = built_like(model, model_class, grown_config)
    _fill(result, model, family, container.width)
    return result


def _family_of(model: Any) -> Family:
    name = model.config.model_type.removeprefix("steps_")
    if isinstance(model.config, StepsTransformerConfig):
        if model.config.residual != "plain":
            raise UserError(
                f"grow: residual: got {model.config.residual!r}, expected plain, where new layers start without effect"
            )
        name = "llama"
    if name not in _GROWING:
        raise UserError(
            f"grow: {type(model).__name__} is of the family {name!r}, expected one of {', '.join(_GROWING)}, or the "
            "Steps-Transformer"
        )
    return FAMILIES[name]


def _container_of(model: Any, family: Family) -> tuple[Container, ContainerPlan]:
    """All layers as a container of the largest width, and the plan of all steps."""
    config = model.config
    layers = list(get_path(model.base_model, family.layers))
    whole = sum(getattr(config, "depths", None) or [config.num_hidden_layers])
    if config.num_hidden_layers != whole:
        got = f"num_hidden_layers={config.num_hidden_layers}"
        raise UserError(f"grow: {type(model).__name__} has {got}, expected the {whole} layers of its depths")
    path = f"{model.base_model_prefix}.{family.layers}"
    check_outside(check_layers(model, layers, family.layers, "grow"), model, path, "grow")
    if not _heads(model):
        name = type(model).__name__
        raise UserError(f"grow: {name}: got no head, expected a model with one, such as LlamaForCausalLM")
    widths = tuple(getattr(config, "widths", None) or [config.hidden_size])
    depths = tuple(getattr(config, "depths", None) or [len(layers)])
    heads = tuple(_per_step(config, "num_attention_heads"))
    groups = heads[-1] // _per_step(config, "num_key_value_heads")[-1]
    own = max(zip(widths, heads))[1]
    ours = isinstance(config, StepsTransformerConfig)
    adapter = BlockAdapter(
        rebuild=lambda layer, width, heads: layer,  # the configuration of the grown model makes its layers
        num_heads=lambda layer: own,
        head_rule=lambda layer: "even" if ours else family.head_rule,
        head_size=lambda layer: max(widths) // own if ours else head_size_of(config),
        kv_groups=lambda layer: groups,
    )
    return Container(path, layers, adapter, 0, max(widths), -1, Example()), ContainerPlan(widths, depths, heads)


def _per_step(config: Any, name: str) -> list[int]:
    if getattr(config, "step_sizes", None):
        return [sizes[name] for sizes in config.step_sizes]
    value = getattr(config, name)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _longer_lists(config: StepsTransformerConfig, plan: ContainerPlan, slices: list[int]) -> StepsTransformerConfig:
    """The configuration of a Steps-Transformer with further steps, whose MLP ratio and groups are the last step's."""
    fields = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "hidden_size", "head_dim", "num_hidden_layers"):
        fields.pop(name, None)
    count = len(config.widths)
    hidden, width = config.intermediate_size[-1], config.widths[-1]
    group = config.num_attention_heads[-1] // config.num_key_value_heads[-1]
    shared = [number // group for number in plan.num_heads[count:] if number]
    fields |= {
        "widths": list(plan.widths),
        "depths": list(plan.depths),
        "norm_slices": slices,
        "num_attention_heads": list(plan.num_heads),
        "num_key_value_heads": [*config.num_key_value_heads, *shared],
        "intermediate_size": [*config.intermediate_size, *(round(hidden / width * new) for new in plan.widths[count:])],
    }
    return StepsTransformerConfig(**fields)


@torch.no_grad()
def _fill(result: Any, model: Any, family: Family, width: int) -> None:
    """Put the old weights into the grown model, and set the new ones so that its function is kept."""
    new_width = result.config.hidden_size
    layers, old_layers = (get_path(one.base_model, family.layers) for one in (result, model))
    _keep_buffers(result, model)
    for layer, old in zip(layers, old_layers):
        take_weights(layer, old)
    for layer in layers[len(old_layers) :]:
        set_types(layer, old_layers[-1])
        silence(layer, family.outputs)
    norm = result.base_model.norm
    old_norm = model.base_model.norm
    parts = old_norm.parts if isinstance(old_norm, SliceNorm) else [old_norm]
    for part, old in zip(norm.parts, parts):
        take_weights(part, old)
    for part in norm.parts[len(parts) :]:
        set_types(part, parts[-1])
    embedding, old_embedding = result.get_input_embeddings(), model.get_input_embeddings()
    set_types(embedding, old_embedding, frozen=True)
    embedding.weight.copy_(drawn_like(old_embedding.weight, new_width - width, -1))
    if embedding.padding_idx is not None:
        embedding.weight[embedding.padding_idx, width:] = 0
    tied = False
    for name, head in _heads(model):
        new_head: Any = result.get_submodule(name)
        if head.weight is old_embedding.weight:
            tied = True
            continue
        set_types(new_head, head, frozen=True)
        new_head.weight.requires_grad_()  # through frozen zeros the new channels would never be read
        new_head.weight.zero_()
        new_head.weight[:, :width] = head.weight
        if head.bias is not None:
            new_head.bias.copy_(head.bias)
    if tied:
        norm.parts[-1].weight.zero_()


def _keep_buffers(result: nn.Module, model: nn.Module) -> None:
    """Copy buffers of the same shape, such as the frequencies of rotary positions, which may have their own type."""
    theirs = dict(model.named_buffers())
    for name, own in list(result.named_buffers()):
        if name in theirs and theirs[name].shape == own.shape:
            parent, _, last = name.rpartition(".")
            result.get_submodule(parent)._buffers[last] = theirs[name].clone()


def _heads(model: Any) -> list[tuple[str, nn.Linear]]:
    """The linear layers outside of the base model, which read its last norm.

    Raises:
        UserError: another module with parameters is there.
    """
    base = model.base_model
    if base is model:
        return []
    found: list[tuple[str, nn.Linear]] = []
    for name, module in model.named_children():
        if module is base or next(module.parameters(), None) is None:
            continue
        if not isinstance(module, nn.Linear) or module.in_features != model.config.hidden_size:
            raise UserError(f"grow: {type(model).__name__}.{name}: got {type(module).__name__}, expected a linear head")
        found.append((name, module))
    return found
