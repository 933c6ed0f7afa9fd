"""timm's VisionTransformers as the first step of a wider StepsNet; convert.py says how their function is kept."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ...errors import UserError
from ...plan import StepPlan
from ...residual.connected import has_design
from ...steps import StepsNet
from ..blocks import method_of_its_own
from ..slice_norm import widened_norm
from ..stepify.adapters import BlockAdapter
from ..stepify.containers import Container
from ..stepify.example import Example
from ..stepify.find_adapter import adapter_of
from ..stepify.plan import ContainerPlan
from ..stepify.replace_blocks import initialized_blocks, spread_drop_path
from ..stepify.roles import get_path, has_path, set_path
from ..stepify.sequence import StepSequence
from .new_weights import drawn_like, silence
from .plan import RoundTo, plan_growth

__all__ = ["grown_vit"]

_DRAWN = ("pos_embed", "cls_token", "reg_token", "dist_token")  # (1, N, C)
_NORMS = ("patch_embed.norm", "norm_pre", "norm", "fc_norm")
_HEADS = ("head", "head_dist")


def grown_vit(
    model: Any, steps: int | None, plan: Mapping[str, Any] | StepPlan | None, round_to: RoundTo
) -> VisionTransformer:
    """As :func:`stepsnet.grow`."""
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"grow: got {type(model).__name__}, expected a VisionTransformer of timm, Steps-DeiT, or a model of "
            "transformers' LLaMA family"
        )
    _check_parts(model)
    container, old = _container_of(model)
    new = plan_growth(container, old, steps, plan, round_to)
    result = copy.deepcopy(model)
    trained = sum(old.depths)
    try:
        added = initialized_blocks(model, container, new.shapes[trained:])
    except UserError as error:  # a block with a tensor that has no role
        raise UserError(f"grow: {str(error).removeprefix('stepify: ')}") from error
    for block in added:
        silence(block.train(model.blocks.training), container.adapter.outputs)
    result.blocks = _with_steps(result.blocks, added, new, len(old.widths))
    spread_drop_path([one.block for one in result.blocks], container.adapter, trained)
    _widen(result, container.width, new.widths[-1])
    result.feature_info = [{**result.feature_info[0], "module": name} for name in _names_of_blocks(result)]
    for info in result.feature_info:
        info["num_chs"] = new.widths[-1]
    return result


def _check_parts(model: VisionTransformer) -> None:
    """Raises UserError for a part with parameters, or a method, that is not known to grow."""
    if name := method_of_its_own(model):
        raise UserError(f"grow: {type(model).__name__}.{name}: got a method of its own, expected timm's")
    if not isinstance(model.head, nn.Linear):
        kind = type(model.head).__name__
        raise UserError(
            f"grow: {type(model).__name__}.head: got {kind}, expected a Linear, which can read more channels"
        )
    known = tuple(f"{name}." for name in ("patch_embed.proj", *_NORMS, *_HEADS, "blocks"))
    others = [name for name, _ in model.named_parameters() if name not in _DRAWN and not name.startswith(known)]
    if others:
        raise UserError(
            f"grow: {type(model).__name__}.{others[0]}: got a part that grow does not know, expected only patches, "
            "learned positions, tokens, norms, blocks and a linear head"
        )


def _container_of(model: Any) -> tuple[Container, ContainerPlan]:
    """The blocks of the widest step as a container, and the plan of all steps."""
    sequence = model.blocks
    if has_design(model):
        raise UserError("grow: a design of the residual stream joins the blocks, expected a model without one")
    plain = not isinstance(sequence, StepsNet)
    blocks = list(sequence) if plain else [one.block for one in sequence]
    widths, depths = ((model.embed_dim,), (len(blocks),)) if plain else (sequence.widths, sequence.blocks_per_step())
    if len({type(block) for block in blocks}) != 1 or (adapter := _adapter(blocks[0], widths[0])) is None:
        raise UserError(
            f"grow: {type(model).__name__}.blocks holds {type(blocks[0]).__name__}, expected timm's Block alone, whose "
            "output projections are known"
        )
    firsts = [sum(depths[:i]) for i in range(len(depths))]
    try:
        heads = tuple(adapter.num_heads(blocks[min(first, len(blocks) - 1)]) for first in firsts)
    except UserError as error:
        raise UserError(f"grow: {type(model).__name__}.blocks: {error}") from error
    widest = max((i for i in range(len(widths)) if depths[i]), key=lambda i: widths[i])
    if widths[widest] != max(widths):
        raise UserError(f"grow: depths: got {tuple(depths)}, expected at least one in the widest step, {max(widths)}")
    of_widest = blocks[firsts[widest] : firsts[widest] + depths[widest]]
    container = Container("blocks", of_widest, adapter, 0, max(widths), -1, Example())
    return container, ContainerPlan(tuple(widths), tuple(depths), heads)


def _adapter(block: nn.Module, width: int) -> BlockAdapter | None:
    adapter = adapter_of(block, width)
    return adapter if adapter is not None and adapter.outputs is not None else None


def _with_steps(sequence: Any, added: list[nn.Module], plan: ContainerPlan, old_steps: int) -> StepsNet:
    """The container with further steps; the old blocks keep their names."""
    remaining = iter(added)
    groups = [[next(remaining) for _ in range(depth)] for depth in plan.depths[old_steps:]]
    if isinstance(sequence, StepsNet) and not isinstance(sequence, StepSequence):
        networks = [*sequence.networks, *(nn.Sequential(*group) for group in groups)]
        grown: StepsNet = StepsNet(networks, plan.widths, sequence.dim)
    else:
        named = OrderedDict(sequence.named_children())
        named |= {str(len(named) + i): block for i, block in enumerate(added)}
        scale = getattr(sequence, "stream_scale", 1.0)  # an nn.Sequential has none
        grown = StepSequence(named, plan.widths, plan.depths, stream_scale=scale)
    for module in (grown, grown.networks, *list(grown.networks)[old_steps:]):  # not the old blocks
        module.training = sequence.training
    grown.grad_checkpointing = getattr(sequence, "grad_checkpointing", False)
    return grown


def _names_of_blocks(model: Any) -> list[str]:
    modules = {module: name for name, module in model.named_modules()}
    return [modules[one.block] for one in model.blocks]


def _widen(model: Any, width: int, new_width: int) -> None:
    """Widen everything outside of the blocks, in place."""
    more = new_width - width
    patches = model.patch_embed.proj
    for parameters in (patches._parameters, model._parameters):
        for name, old in parameters.items():
            if old is not None and (parameters is patches._parameters or name in _DRAWN):
                dim = 0 if parameters is patches._parameters else -1
                parameters[name] = nn.Parameter(drawn_like(old, more, dim), old.requires_grad)
    if isinstance(patches, nn.Linear):
        patches.out_features = new_width
    else:
        patches.out_channels = new_width
    for path in _NORMS:
        if has_path(model, path) and not isinstance(norm := get_path(model, path), nn.Identity):
            set_path(model, path, widened_norm(norm, width, more))
    for name in _HEADS:
        if isinstance(head := getattr(model, name, None), nn.Linear):
            zeros = torch.zeros_like(head.weight[:, :1]).expand(-1, more)
            # trained even if the network is frozen: through zeros the new channels would never be read
            head.weight = nn.Parameter(torch.cat((head.weight.detach(), zeros), 1))
            head.in_features = new_width
    model.embed_dim = model.num_features = model.head_hidden_size = new_width
