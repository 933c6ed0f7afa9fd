"""Any residual model as a StepsNet of like compute: its blocks at several widths, and everything else as it was.

``stepify("convnext_atto", steps=3)``, or ``stepify(model, steps=3)`` for a model that exists. What a block class needs
for that is a row of adapters.py; what the result is, is StepSequence.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..errors import UserError, nearest
from ..plan import Profile
from .adapters import BlockAdapter, rebuilt, signature_of
from .containers import Container, Example, find_containers
from .rebuild import get_path, has_path
from .step_plan import ContainerPlan, Match, explicit_plan, search_plan
from .step_sequence import StepSequence

__all__ = ["create", "example_of", "model_and_example", "stepify"]

PerStage = Any  # one value per step, or for several stages such a sequence for each


def stepify(
    model: nn.Module | str,
    steps: int = 3,
    *,
    profile: Profile = "steps",
    match: Match = "macs",
    blocks: int | None = None,
    stages: Sequence[int] | None = None,
    widths: PerStage = None,
    depths: PerStage = None,
    num_heads: PerStage = None,
    round_to: Literal["heads"] | int = "heads",
    stream_scale: float = 1.0,
    example: Tensor | None = None,
    tokens: int = 256,
    **model_args: Any,
) -> nn.Module:
    """The StepsNet of a residual model: the same class, stem, positions, norms and head, and blocks in steps.

    The model that is given is not changed. New blocks start as the model's library starts them; all other weights
    are the model's. With ``steps=1`` the result is the model, weights and names included.

    Args:
        model: a timm model or its name, or any model whose body is containers of like residual blocks.
        steps: n, the number of steps; odd for a bow-tie.
        profile: "steps" from narrow to wide, "reverse", or "bowtie", as in :func:`stepsnet.plan_steps`.
        match: what the new blocks of a container have to add up to: its "macs" or its "params".
        blocks: number of blocks of each container to reach at the same cost; by default near to twice as many with
            three steps.
        stages: of a hierarchical model, counted from 1, as in Table 11; by default those with at least ``steps``
            blocks that keep their width and resolution. The blocks of the others stay as they are.
        widths, depths, num_heads: an explicit plan in place of the search, one entry per step in the order of
            execution; for several stages one such sequence for each. The widest is the model's own width.
        round_to: "heads" rounds widths as the paper does, a number to a multiple of it. Blocks without heads have
            multiples of 8, or of 4 below a width of 64.
        stream_scale: factor of the stream where it enters each container of several steps, see
            :func:`stepsnet.describe_stepify`.
        example: a batch that the model takes, for a model of neither library; only its shape counts.
        tokens: the sequence length at which the compute of a model of transformers is matched.
        **model_args: for ``timm.create_model``, where a name is given.

    Raises:
        UserError: a name that timm does not know, a model without such containers, a block without an adapter, or a
            plan that does not fit; the message names the module.
    """
    model, call, _ = model_and_example(model, {"example": example, "tokens": tokens, **model_args})
    is_transformer = _is_of_transformers(model)
    if is_transformer:
        from .stepify_transformers import in_steps, layers_of_transformer

        found = [layers_of_transformer(model, call)]
    else:
        found = find_containers(model, call)
    chosen = _chosen(found, steps, stages, widths)
    plans: dict[str, ContainerPlan] = {}
    if widths is None and depths is None and num_heads is None:
        for container in chosen:
            plans[container.path] = search_plan(container, steps, profile, match, blocks, round_to)
    else:
        given = (_per_stage(value, name, chosen) for name, value in (("widths", widths), ("depths", depths)))
        heads = [None] * len(chosen) if num_heads is None else _per_stage(num_heads, "num_heads", chosen)
        for container, *plan in zip(chosen, *given, heads):
            plans[container.path] = explicit_plan(container, *plan)
    if is_transformer:
        return in_steps(model, found[0], plans[found[0].path], stream_scale)
    return _build(model, found, plans, stream_scale)


_OPTIONS = frozenset(inspect.signature(stepify).parameters) - {"model", "model_args"}


def create(**kwargs: Any) -> nn.Module:
    """:func:`stepify` for a :class:`~stepsnet.config.ModelSpec`: ``{"name": "stepify", "args": {"model": NAME, …}}``.

    Raises:
        ValueError: no ``model``.
        UserError: as :func:`stepify`.
    """
    if not isinstance(kwargs.get("model"), str):
        raise ValueError(f"args.model: got {kwargs.get('model')!r}, expected the name of a timm model")
    return stepify(**kwargs)


def model_and_example(model: nn.Module | str, options: Mapping[str, Any]) -> tuple[nn.Module, Example, dict[str, Any]]:
    """The model that is named, what it is called with, and the options of :func:`stepify` without the model's own.

    Raises:
        UserError: an unknown name, or options that are neither stepify's nor, beside a name, the model's.
    """
    own = {key: value for key, value in options.items() if key not in _OPTIONS}
    options = {key: value for key, value in options.items() if key in _OPTIONS}
    if isinstance(model, str):
        model = _named(model, own)
    elif own:
        raise UserError(f"stepify: got {', '.join(own)} beside a model, expected such arguments only beside a name")
    if _is_of_transformers(model):
        from .stepify_transformers import token_example

        return model, token_example(model, options.get("tokens", 256)), options
    return model, example_of(model, options.get("example")), options


def example_of(model: nn.Module, given: Tensor | None = None) -> Example:
    """What a model is called with, on the meta device. Raises UserError where it is not known."""
    if given is not None:
        return Example((given[:1].to("meta"),))
    from timm.data import resolve_model_data_config

    if not hasattr(model, "pretrained_cfg"):
        raise UserError(
            f"stepify: {type(model).__name__} is not a timm model, expected example=, a batch that it takes"
        )
    chans, height, width = resolve_model_data_config(model)["input_size"]
    patches = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    if built_for := getattr(patches, "img_size", None):
        height, width = built_for
    return Example((torch.empty(1, getattr(model, "in_chans", chans), height, width, device="meta"),))


def _is_of_transformers(model: nn.Module) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _named(name: str, args: dict[str, Any]) -> nn.Module:
    import timm

    if name.startswith("transformers:"):
        from .stepify_transformers import model_of_name

        return model_of_name(name.removeprefix("transformers:"), args)
    name = name.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(
            f"model: got {name!r}, expected a timm model, or transformers:NAME{nearest(name, timm.list_models())}"
        )
    try:
        return timm.create_model(name, **args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {name}: {' '.join(str(error).split())}") from error


def _chosen(found: list[Container], steps: int, stages: Sequence[int] | None, widths: PerStage) -> list[Container]:
    if stages is None:
        chosen = [one for one in found if one.depth >= steps] if len(found) > 1 and widths is None else found
        if not chosen:
            depths = ", ".join(str(one.depth) for one in found)
            raise UserError(f"steps: got {steps}, expected at most the blocks of a stage, which are {depths}")
        return chosen
    if not all(1 <= stage <= len(found) for stage in stages) or len(set(stages)) != len(stages) or not stages:
        raise UserError(f"stages: got {tuple(stages)}, expected some of the model's {len(found)}, counted from 1")
    return [found[stage - 1] for stage in sorted(stages)]


def _per_stage(value: PerStage, name: str, chosen: list[Container]) -> list[Sequence[int]]:
    """One sequence per chosen stage; a single stage may leave out the outer brackets."""
    if value is None:
        raise UserError(f"{name}: got none, expected widths and depths together")
    if len(chosen) == 1 and all(isinstance(one, int) for one in value):
        return [value]
    if len(value) != len(chosen) or any(isinstance(one, int) for one in value):
        places = ", ".join(container.path for container in chosen)
        raise UserError(f"{name}: got {value}, expected {len(chosen)} sequences, one for each of {places}")
    return list(value)


def _build(model: nn.Module, found: list[Container], plans: dict[str, ContainerPlan], stream_scale: float) -> nn.Module:
    """A copy of the model with a StepSequence in each container's place, those without a plan in one step."""
    as_it_is = {c.path for c in found if c.path not in plans or _is_as_before(c, plans[c.path])}
    replaced = [block for c in found if c.path not in as_it_is for block in c.blocks[c.lead :]]
    result = copy.deepcopy(model, {id(block): nn.Identity() for block in replaced})
    for container in found:
        members = list(get_path(result, container.path) if container.path else result)
        widths, depths, scale = (container.width,), (container.depth,), 1.0
        if container.path not in as_it_is:
            plan = plans[container.path]
            widths, depths = plan.widths, plan.depths
            members = [*members[: container.lead], *_new_blocks(container, plan)]
            scale = stream_scale
        sequence = StepSequence(members, widths, depths, container.dim, container.lead, scale)
        result = _put(result, container.path, sequence.train(container.template.training))
    new = [c for c in found if c.path not in as_it_is]
    for container in new:
        _start(container, get_path(result, container.path) if container.path else result)
    initializers = {container.adapter.initialize for container in new} - {None}
    for initialize in initializers:
        with torch.no_grad():
            initialize(result)  # type: ignore[misc]
    _give_back(model, result, new)
    _check_initialized(result, new)
    _note_features(model, result, new)
    return result


def _is_as_before(container: Container, plan: ContainerPlan) -> bool:
    return (plan.widths, plan.depths) == ((container.width,), (container.depth,))


def _put(model: nn.Module, path: str, sequence: StepSequence) -> nn.Module:
    if not path:
        return sequence
    parent, _, name = path.rpartition(".")
    setattr(get_path(model, parent) if parent else model, name, sequence)
    return model


def _new_blocks(container: Container, plan: ContainerPlan) -> list[nn.Module]:
    """Block j is made from the original j modulo the period in which the originals differ, as shifted windows do."""
    originals, adapter = container.blocks[container.lead :], container.adapter
    kinds = [signature_of(block, adapter.drop_paths) for block in originals]
    periods = range(1, len(kinds))
    period = next((p for p in periods if all(kinds[i] == kinds[i - p] for i in range(p, len(kinds)))), len(kinds))
    rates = [_drop_rate(block, adapter) for block in originals]
    count = len(plan.shapes)
    blocks = []
    for j, (width, heads) in enumerate(plan.shapes):
        block = rebuilt(adapter, originals[j % period], width, heads, f"{container.path}.{j}")
        rate = rates[0] + (rates[-1] - rates[0]) * j / max(1, count - 1)
        for path in adapter.drop_paths:
            _set_drop_rate(block, path, rate, originals)
        blocks.append(block)
    return blocks


def _drop_rate(block: nn.Module, adapter: BlockAdapter) -> float:
    paths = [get_path(block, path) for path in adapter.drop_paths if has_path(block, path)]
    return next((part.drop_prob for part in paths if isinstance(part, DropPath)), 0.0)


def _set_drop_rate(block: nn.Module, path: str, rate: float, originals: list[nn.Module]) -> None:
    without = next((part for one in originals if not isinstance(part := get_path(one, path), DropPath)), nn.Identity())
    scales = [part.scale_by_keep for one in originals if isinstance(part := get_path(one, path), DropPath)]
    setattr(block, path, DropPath(rate, all(scales)) if rate > 0 else copy.copy(without))


def _start(container: Container, sequence: Any) -> None:
    """Every new module as its constructor leaves it: ``reset_parameters`` from the inside out, and declared values."""
    adapter = container.adapter
    if adapter.initialize is None:
        return
    originals = container.blocks[container.lead :]
    with torch.no_grad():
        for block in list(sequence._modules.values())[container.lead :]:
            for module in reversed(list(block.modules())):
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            for path, parameter in block.named_parameters():
                for pattern, value in (adapter.start or {}).items():
                    if fnmatchcase(path, pattern):
                        parameter.fill_(_common_value(originals, path, value))


def _common_value(blocks: list[nn.Module], path: str, default: float) -> float:
    """What all blocks have there, if they have one value and so have not been trained, else the library's default."""
    values = [get_path(block, path) for block in blocks if has_path(block, path)]
    first = values[0].flatten()[0] if values and values[0].device.type != "meta" else None
    return first.item() if first is not None and all(bool((v == first).all()) for v in values) else default


@torch.no_grad()
def _give_back(original: nn.Module, result: nn.Module, new: list[Container]) -> None:
    """Every tensor outside of the new blocks is the original's again, bit for bit."""
    inside = {
        id(tensor)
        for container in new
        for block in list(_sequence(result, container)._modules.values())[container.lead :]
        for tensor in (*block.parameters(), *block.buffers())  # type: ignore[union-attr]
    }
    theirs = dict([*original.named_parameters(remove_duplicate=False), *original.named_buffers(remove_duplicate=False)])
    for name, tensor in (*result.named_parameters(), *result.named_buffers()):
        if id(tensor) not in inside and tensor.device.type != "meta":
            tensor.copy_(theirs[name])


def _sequence(model: nn.Module, container: Container) -> Any:
    return get_path(model, container.path) if container.path else model


def _check_initialized(result: nn.Module, new: list[Container]) -> None:
    for container in new:
        for name, tensor in (
            *_sequence(result, container).named_parameters(),
            *_sequence(result, container).named_buffers(),
        ):
            if tensor.device.type != "meta" and tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise UserError(
                    f"stepify: {container.path}.{name} is not initialized by {type(result).__name__}'s own function, "
                    "expected a value for it in the adapter's start"
                )


def _note_features(original: nn.Module, result: Any, new: list[Container]) -> None:
    """timm's list of feature maps: where it has one entry per block, now one for each of the new blocks."""
    info = getattr(result, "feature_info", None)
    if not isinstance(info, list) or len(new) != 1:
        return
    container = new[0]
    per_block = [entry for entry in info if entry.get("module", "").rpartition(".")[0] == container.path]
    if len(per_block) == len(info) == len(container.blocks):
        count = len(_sequence(result, container))
        result.feature_info = [{**info[0], "module": f"{container.path}.{index}"} for index in range(count)]
