"""A copy of a model with new blocks in steps, initialized as the model's library does it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from timm.layers import DropPath
from torch import nn

from ...errors import UserError
from ...macs import HOOKS
from .adapters import BlockAdapter, initialize_like, initializer_of, rebuilt
from .containers import Container
from .copies import check_leaves
from .differences import number, originals_of, rate_at, rates_that_grow, spread_rates
from .plan import ContainerPlan
from .roles import get_path, has_path, set_path
from .sequence import StepSequence

__all__ = ["build_in_steps", "initialized_blocks", "sequence_at", "spread_drop_path"]


def build_in_steps(
    model: nn.Module, found: list[Container], plans: dict[str, ContainerPlan], stream_scale: float
) -> nn.Module:
    """A copy of the model with a StepSequence in each container's place, in one step for those without a plan."""
    as_it_is = {c.path for c in found if c.path not in plans or plans[c.path].is_of(c)}
    replaced = [block for c in found if c.path not in as_it_is for block in c.blocks[c.lead :]]
    check_leaves(model, replaced)
    result = copy.deepcopy(model, {id(block): nn.Identity() for block in replaced})
    for container in found:
        members = dict(sequence_at(result, container).named_children())
        plan = ContainerPlan((container.width,), (container.depth,), (None,))
        scale = stream_scale if container.path in plans else 1.0
        if container.path not in as_it_is:
            plan = plans[container.path]
            members = dict(list(members.items())[: container.lead])  # under their names, whatever these are
            numbers = (str(i) for i in itertools.count(container.lead) if str(i) not in members)
            members |= dict(zip(numbers, _new_blocks(container, plan.shapes)))
        sequence = StepSequence(members, plan.widths, plan.depths, container.dim, container.lead, scale)
        before = sequence_at(result, container)
        sequence.training = before.training
        vars(sequence).update({name: hooks for name, hooks in vars(before).items() if name in HOOKS})
        result = _put(result, container.path, sequence)
    new = [c for c in found if c.path not in as_it_is]
    for container in new:
        _keep_padding(result, container.path)
    _initialize(result, new)
    _give_back(model, result, new)
    _check_initialized(result, new)
    _note_features(result, new)
    return result


def _put(model: nn.Module, path: str, sequence: nn.Module) -> nn.Module:
    if not path:
        return sequence
    set_path(model, path, sequence)
    return model


def _keep_padding(model: nn.Module, path: str) -> None:
    """Keep torch's encoder from dropping padding in evaluation: it would use a nested tensor, which cannot be cut."""
    parent = path.rpartition(".")[0]
    around: Any = get_path(model, parent) if parent else model
    if isinstance(around, nn.TransformerEncoder):
        around.use_nested_tensor = False


def initialized_blocks(model: nn.Module, container: Container, shapes: list[tuple[int, int | None]]) -> list[nn.Module]:
    """New blocks like those of the model's container, one per (width, heads), initialized as its library does it."""
    without = copy.deepcopy(model, {id(block): nn.Identity() for block in container.blocks})
    scratch = _put(without, container.path, nn.Sequential(*_new_blocks(container, shapes)))
    _initialize(scratch, [container])
    _check_initialized(scratch, [container])
    return list(sequence_at(scratch, container))


def spread_drop_path(blocks: list[nn.Module], adapter: BlockAdapter, trained: int) -> None:
    """Spread stochastic depth over all blocks, from the first to the last rate of the first ``trained`` blocks."""
    rates = [_drop_rate(block, adapter) for block in blocks[:trained]]
    originals = blocks[:trained]
    for j, block in enumerate(blocks):
        for path in adapter.drop_paths:
            _set_drop_rate(block, path, rate_at(rates, j, len(blocks)), originals)


def _new_blocks(container: Container, shapes: list[tuple[int, int | None]]) -> list[nn.Module]:
    """New blocks, each from an original of its kind (:func:`originals_of`), with growing rates spread anew."""
    originals, adapter = container.blocks[container.lead :], container.adapter
    grown = {} if adapter.drop_paths else rates_that_grow(originals)
    places = originals_of(originals, len(shapes), adapter.drop_paths, [path for path, _ in grown if path])
    rates = [_drop_rate(block, adapter) for block in originals]
    blocks = []
    for j, ((width, heads), place) in enumerate(zip(shapes, places)):
        template = originals[place]
        block = rebuilt(adapter, template, width, heads, f"{container.path}.{j}")
        if adapter.initialize is None:  # the user's own function may make tensors of any device and type
            _to_types_of(block, template)
        for path in adapter.drop_paths:
            _set_drop_rate(block, path, rate_at(rates, j, len(shapes)), originals)
        blocks.append(block.train(template.training))
    templates = [originals[place] for place in places]
    spread_rates(blocks, templates, originals, grown)
    number(blocks, templates, originals, container.lead)
    return blocks


def _to_types_of(block: nn.Module, template: nn.Module) -> None:
    """Move a block to the device of another, and each parameter and buffer to the dtype of its namesake there.

    A floating-point tensor without a namesake gets the dtype of the other block's first floating-point parameter.
    """
    types = {name: tensor.dtype for name, tensor in (*template.named_parameters(), *template.named_buffers())}
    common = next((parameter.dtype for parameter in template.parameters() if parameter.is_floating_point()), None)
    block.to(next(template.parameters()).device)
    for path, module in block.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            dtype = types.get(".".join(filter(None, (path, name))), common if tensor.is_floating_point() else None)
            if dtype in (None, tensor.dtype):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(dtype)
            else:
                module._buffers[name] = tensor.to(dtype)


def _drop_rate(block: nn.Module, adapter: BlockAdapter) -> float:
    paths = [get_path(block, path) for path in adapter.drop_paths if has_path(block, path)]
    return next((part.drop_prob for part in paths if isinstance(part, DropPath)), 0.0)


def _set_drop_rate(block: nn.Module, path: str, rate: float, originals: list[nn.Module]) -> None:
    without = next((part for one in originals if not isinstance(part := get_path(one, path), DropPath)), nn.Identity())
    scales = [part.scale_by_keep for one in originals if isinstance(part := get_path(one, path), DropPath)]
    part = DropPath(rate, all(scales)) if rate > 0 else copy.deepcopy(without)
    setattr(block, path, part if part is None else part.train(block.training))


@torch.no_grad()
def _initialize(model: nn.Module, new: list[Container]) -> None:
    """Initialize the new blocks as the model's library does it, whatever their types, in float32.

    A normal distribution that is cut at 2, as timm has it, is drawn by rounding in bfloat16: some values are 2.
    """
    with _in_float32([block for container in new for block in _new_of(model, container)]):
        for container in new:
            _start(container, _new_of(model, container))
        _initialize_around(model, new)
        _start_as_originals(model, new)


@contextmanager
def _in_float32(blocks: list[nn.Module]) -> Iterator[None]:
    """Hold floating-point tensors of fewer bits in float32."""
    found = {id(tensor): tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    types = {key: tensor.dtype for key, tensor in found.items() if tensor.dtype in (torch.bfloat16, torch.float16)}
    for key in types:
        found[key].data = found[key].data.float()
    yield
    for key, dtype in types.items():
        found[key].data = found[key].data.to(dtype)


def _new_of(model: nn.Module, container: Container) -> list[nn.Module]:
    return list(sequence_at(model, container)._modules.values())[container.lead :]


def _start(container: Container, blocks: list[nn.Module]) -> None:
    """Reset new modules to what constructors leave: ``reset_parameters`` from the inside out, then declared values."""
    adapter = container.adapter
    if adapter.initialize is None:
        return
    originals = container.blocks[container.lead :]
    for block in blocks:
        for module in reversed(list(block.modules())):
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        for path, parameter in block.named_parameters():
            for pattern, value in (adapter.start or {}).items():
                if fnmatchcase(path, pattern):
                    common = _common_value(originals, path)
                    parameter.fill_(value if common is None else common)


def _initialize_around(model: nn.Module, new: list[Container]) -> None:
    """Initialize each model of the library once; it may be inside of another model."""
    originals: dict[Any, list[nn.Module]] = {}
    for container in new:
        adapter = container.adapter
        key = initialize_like if adapter.constructed else adapter.initialize, _around(model, container.path)
        originals.setdefault(key, []).extend(container.blocks)
    for (initialize, inner), blocks in originals.items():
        if initialize is not None:
            initialize(inner, blocks)


def _around(model: nn.Module, path: str) -> nn.Module:
    """The innermost module around a path that has a function to initialize all its weights, else the outermost."""
    while path:
        path = path.rpartition(".")[0]
        inner = get_path(model, path) if path else model
        if initializer_of(inner) is not None:
            return inner
    return model


def _start_as_originals(model: nn.Module, new: list[Container]) -> None:
    """In blocks that were merely constructed, fill each parameter that has one value in all originals with that value.

    It may have been an argument of their constructor, such as a scale, or set afterwards, such as weights that start
    at 0.
    """
    for container in new:
        if not container.adapter.constructed:
            continue
        originals = container.blocks[container.lead :]
        for block in _new_of(model, container):
            for path, parameter in block.named_parameters():
                common = _common_value(originals, path)
                if common is not None and parameter.device.type != "meta":
                    parameter.fill_(common)


def _common_value(blocks: list[nn.Module], path: str) -> float | None:
    """The one value of a parameter in all blocks, which have then not been trained; None if it has several."""
    values = [get_path(block, path) for block in blocks if has_path(block, path)]
    first = values[0].flatten()[0] if values and values[0].device.type != "meta" else None
    return first.item() if first is not None and all(bool((v == first).all()) for v in values) else None


@torch.no_grad()
def _give_back(original: nn.Module, result: nn.Module, new: list[Container]) -> None:
    """Copy every tensor outside of the new blocks back from the original, bit for bit."""
    inside = {
        id(tensor)
        for container in new
        for block in _new_of(result, container)
        for tensor in (*block.parameters(), *block.buffers())
    }
    theirs = dict([*original.named_parameters(remove_duplicate=False), *original.named_buffers(remove_duplicate=False)])
    for name, tensor in (*result.named_parameters(), *result.named_buffers()):
        if id(tensor) not in inside and tensor.device.type != "meta":
            tensor.copy_(theirs[name])


def sequence_at(model: nn.Module, container: Container) -> Any:
    return get_path(model, container.path) if container.path else model


def _check_initialized(result: nn.Module, new: list[Container]) -> None:
    for container in new:
        for name, tensor in (
            *sequence_at(result, container).named_parameters(),
            *sequence_at(result, container).named_buffers(),
        ):
            if tensor.device.type != "meta" and tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise UserError(
                    f"stepify: {container.path}.{name} is not initialized by {type(result).__name__}'s own function, "
                    "expected a value for it in the adapter's start"
                )


def _note_features(result: Any, new: list[Container]) -> None:
    """Update timm's list of feature maps: if it had one entry per block, it gets one for each new block."""
    info = getattr(result, "feature_info", None)
    if not isinstance(info, list) or len(new) != 1:
        return
    container = new[0]
    per_block = [entry for entry in info if entry.get("module", "").rpartition(".")[0] == container.path]
    if len(per_block) == len(info) == len(container.blocks):
        count = len(sequence_at(result, container))
        result.feature_info = [{**info[0], "module": f"{container.path}.{index}"} for index in range(count)]
