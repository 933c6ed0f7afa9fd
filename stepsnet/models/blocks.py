"""The residual blocks of any model in the order of execution, and those of a StepsNet by step and width."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from ..errors import UserError
from ..plan import per_block
from ..residual.design import DesignPart
from ..steps import StepsNet
from ..stream import StreamBlock, module_of, recomputed_as
from .layer_config import PerLayer

__all__ = [
    "blocks_of",
    "blocks_to_recompute",
    "check_no_peft",
    "is_in_steps",
    "is_of_transformers",
    "is_transformer_in_steps",
    "members_of",
    "method_of_its_own",
    "recompute_blocks",
    "step_sequences",
    "widths_of",
]


def step_sequences(model: nn.Module) -> list[StepsNet]:
    """A model's StepsNets in order, one per stage, without those nested in a step of another."""
    found = [module for module in model.modules() if isinstance(module, StepsNet)]
    nested = {inner for container in found for inner in container.networks.modules()}
    return [container for container in found if container not in nested]


def blocks_of(model: nn.Module, steps: Sequence[int] | None = None) -> list[nn.Module]:
    """The residual blocks of any model, in the order of execution.

    In a model without a StepsNet, they are the members of its sequences of modules of one type, such as the usual
    ``blocks`` or ``layers``; if a member has ``blocks`` itself, as timm's stages do, those are taken instead. A
    detector or segmenter has its backbone as ``trunk``, so that sequences in its heads are not taken for blocks.

    Args:
        steps: only the blocks of these steps, counted from 1 in each stage.

    Raises:
        ValueError: the model has no such step.
    """
    if steps is not None:
        blocks = blocks_of(model)
        step_of_block = _step_of_each_block(model)[: len(blocks)]  # fewer layers may run than there are
        last = max(step_of_block, default=0)
        if not all(1 <= step <= last for step in steps):
            raise ValueError(
                f"got steps {list(steps)}, expected numbers from 1 to the model's number of steps, which is {last}"
            )
        return [block for block, step in zip(blocks, step_of_block) if step in steps]
    containers = step_sequences(model)
    if containers:
        return [module_of(block) for container in containers for block in container]
    is_transformer = is_transformer_in_steps(model)
    least = 1 if is_transformer else 2  # in other models, a sequence of one module may be anything
    found: list[nn.Module] = []
    trunk = getattr(model, "trunk", None)
    for module in (trunk if isinstance(trunk, nn.Module) else model).modules():
        members = members_of(module)
        same_type = len(members) >= least and len({type(member) for member in members}) == 1
        is_design = same_type and isinstance(members[0], DesignPart)  # how streams begin and end, not blocks
        if same_type and not is_design and any(True for _ in members[0].parameters()):
            found += [block for member in members for block in _blocks_of_stage(member)]
    nested = {inner for block in found for inner in block.modules() if inner is not block}
    blocks = [block for block in dict.fromkeys(found) if block not in nested]  # a block may hold sequences too
    return blocks[: cast(Any, model).config.num_hidden_layers] if is_transformer else blocks


def widths_of(model: nn.Module) -> list[int]:
    """The width that each block of a StepsNet reads and writes, in the order of execution; empty without a StepsNet."""
    if is_transformer_in_steps(model):
        config = cast(Any, model).config
        return per_block(config.widths, config.depths)[: config.num_hidden_layers]
    return [_width_of(block) for container in step_sequences(model) for block in container]


def is_in_steps(model: nn.Module) -> bool:
    """Whether the blocks of one container have several widths, as they never have in a plain network of stages."""
    if is_transformer_in_steps(model):
        return len(set(cast(Any, model).config.widths)) > 1
    return any(len(set(container.widths)) > 1 for container in step_sequences(model))


def method_of_its_own(model: Any) -> str:
    """The first method of a VisionTransformer's forward pass that neither timm nor stepsnet defines, or ""."""
    names = ("forward", "forward_features", "forward_head", "pool", "_pos_embed")
    modules = {name: getattr(model, name).__module__.partition(".")[0] for name in names if hasattr(model, name)}
    return next((name for name, module in modules.items() if module not in ("timm", "stepsnet")), "")


def is_of_transformers(model: Any) -> bool:
    """Whether the model is one of the transformers library, without importing that library."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def check_no_peft(model: nn.Module, caller: str) -> None:
    """Raise UserError if the model has PEFT's adapters, which new blocks would lack."""
    path = next((path for path, one in model.named_modules() if type(one).__module__.startswith("peft.")), None)
    if path is not None:
        raise UserError(
            f"{caller}: {type(model).__name__}{path and f'.{path}'} is a module of PEFT, expected the model "
            "without adapters (as merge_and_unload() returns it); add adapters afterwards"
        )


def is_transformer_in_steps(model: nn.Module) -> bool:
    """Whether the model is one of transformers in steps: its layers are one flat list, without a StepsNet module,
    and its residual stream begins with the input embeddings."""
    return isinstance(getattr(model, "config", None), PerLayer)


def blocks_to_recompute(model: nn.Module, chosen: float | tuple[int, ...]) -> list[nn.Module]:
    """The first ``chosen`` share of the model's blocks, or those of the listed steps, counted from 1.

    Raises:
        UserError: no sequence of blocks is found in the model, or it has no such step.
    """
    if not isinstance(chosen, tuple):
        blocks = blocks_of(model)
        if chosen and not blocks:
            raise UserError(f"grad_checkpointing: got {chosen}, but no sequence of blocks was found in the model")
        return blocks[: round(chosen * len(blocks))]
    try:
        return blocks_of(model, chosen)
    except ValueError as error:
        raise UserError(f"grad_checkpointing: {error}") from None


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Keep only each block's input, and run the block again in the backward pass, with the same random numbers.

    This works for the blocks of any model. timm's ``set_grad_checkpointing`` does the same for whole models, and can
    be undone.
    """
    for block in blocks:
        block.forward = partial(recomputed_as, block, block.forward)


def members_of(sequence: Any) -> list[nn.Module]:
    """The modules in a sequence, without any None in place of one; an empty list for anything else."""
    members = list(sequence) if isinstance(sequence, (nn.Sequential, nn.ModuleList)) else []
    return [member for member in members if member is not None]


def _blocks_of_stage(member: nn.Module) -> list[nn.Module]:
    blocks = getattr(member, "blocks", None)
    return members_of(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else [member]


def _step_of_each_block(model: nn.Module) -> list[int]:
    """The step of each block, counted from 1 in each stage, in the order of execution."""
    stages = [container.blocks_per_step() for container in step_sequences(model)]
    if is_transformer_in_steps(model):
        stages = [cast(Any, model).config.depths]
    return [step for depths in stages for step, depth in enumerate(depths, 1) for _ in range(depth)]


def _width_of(block: StreamBlock) -> int:
    """The width of the block itself, even if StepsNets are nested."""
    return _width_of(block.block_call) if isinstance(block.block_call, StreamBlock) else block.width
