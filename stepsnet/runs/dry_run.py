"""What a run would do, found without training: everything is built and the first batch loaded, as in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.complexity import Complexity
from ..analysis.memory import Memory, peak_bytes, readable_bytes, states_memory
from ..engine.distributed import DistributedContext, init_distributed
from ..engine.optim import Schedule, build_optimizer
from ..engine.prepare import prepare
from ..engine.task import BatchShard, Task, data_counts
from ..engine.train import describe_batch
from ..errors import import_extra
from ..models.blocks import blocks_to_recompute, recompute_blocks
from ..models.build import build_model
from ..output.terminal import counted
from ..run_folder.resuming import can_go_on, is_past_its_start
from ..settings.config import Recipe
from ..settings.from_data import with_baseline
from ..settings.overrides import to_yaml
from .prepare import check_folder, prepare_run

__all__ = ["Forecast", "forecast", "render_forecasts"]


@dataclass(frozen=True)
class Forecast:
    """What is known of a run before its first update."""

    recipe: Recipe
    label: str  # of the model, such as StepsNet or baseline
    updates_per_epoch: int
    complexity: Complexity
    unit: str  # what the multiply-accumulates are counted for, such as image
    effective_batch: str
    first_batch: str  # shapes and dtypes of one rank's first forward pass
    memory: Memory  # on one device
    activations_unknown: str  # why they are not in ``memory``; empty if they are
    notices: Sequence[str]


def forecast(recipe: Recipe, label: str = "", resumed: Path | None = None, has_checkpoints: bool = False) -> Forecast:
    """Build model, data, optimizer and schedule, and load the first batch. Under torchrun every rank calls it.

    Nothing is written but the cache of what is computed once per data set.

    Args:
        resumed: the folder whose run would be resumed, if one has begun there.
        has_checkpoints: whether runs elsewhere have checkpoints, as in :func:`prepare_run`.

    Raises:
        UserError: for whatever a run refuses before its first update.
    """
    with init_distributed(recipe.device) as context:
        goes_on = resumed is not None and can_go_on(resumed)
        has_checkpoints = has_checkpoints or (resumed is not None and is_past_its_start(resumed))
        prepared = prepare_run(recipe, goes_on=goes_on, has_checkpoints=has_checkpoints)
        lines = check_folder(resumed, prepared) if resumed is not None else []
        context.check_same(dataclasses.asdict(recipe))
        recipe, model, task = prepared.recipe, prepared.model, prepared.task
        context.check_same({"data": data_counts(task)})
        if recipe.tracker:
            context.on_main(partial(import_extra, recipe.tracker, "tracker"))
        shard = BatchShard(context.rank, context.world_size, recipe.accumulation_steps)
        effective_batch = describe_batch(recipe, context, task)
        state, _ = prepare(model, recipe, context)
        Schedule(state.optimizer, recipe, task.steps_per_epoch)
        with closing(task.batches(0, 0, shard, context.device)) as batches:
            batch = next(batches)
        built = build_model(recipe.model, pretrained=False)  # for its size
        memory, unknown = _memory(built, task, recipe, batch, context)
        return Forecast(
            recipe,
            label or recipe.model.name,
            task.steps_per_epoch,
            task.complexity(built),
            task.unit.removesuffix("s"),
            effective_batch,
            _described(batch),
            memory,
            unknown,
            [*prepared.lines, *lines, *task.notices()],
        )


def _memory(
    model: nn.Module, task: Task, recipe: Recipe, batch: Any, context: DistributedContext
) -> tuple[Memory, str]:
    """Return the memory of training on one device, and why the activations are missing from it, if they are."""

    def recompute(model: nn.Module) -> None:
        recompute_blocks(blocks_to_recompute(model, recipe.grad_checkpointing))

    activations, unknown = 0, ""
    try:
        activations = peak_bytes(model.train(), batch, lambda *given: task.loss(*given)[0], recompute, recipe.amp_dtype)
    except Exception as error:  # from torch, if the loss needs values: a detector's depends on what it finds
        unknown = f"not predicted, since they depend on more than shapes ({type(error).__name__})"
    sharded = context.world_size > 1 and recipe.parallel == "fsdp"
    memory = states_memory(
        model,
        optimizer_states=_optimizer_states(recipe),
        average=recipe.ema_decay is not None,
        shards=context.world_size if sharded else 1,
        activations=activations,
    )
    return memory, unknown


def _optimizer_states(recipe: Recipe) -> float:
    """Return how many numbers the optimizer keeps per parameter, measured by updating one matrix."""
    matrix = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(matrix, dataclasses.replace(recipe, layer_decay=None))
    matrix(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(one.numel() for one in kept if isinstance(one, Tensor) and one.dim()) / matrix.weight.numel()


def _described(value: Any) -> str:
    """Describe a batch, such as ``float32 32×1×8×8, int64 32``; a list by its length and first item."""
    if isinstance(value, Tensor):
        shape = "×".join(map(str, value.shape)) or "scalar"
        return f"{str(value.dtype).removeprefix('torch.')} {shape}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_described(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, tuple):
        return ", ".join(map(_described, value))
    if isinstance(value, list):
        more = ", …" if len(value) > 1 else ""
        return f"list of {len(value)} [{_described(value[0])}{more}]" if value else "list of 0"
    return repr(value)


def render_forecasts(forecasts: Sequence[Forecast], about: str) -> str:
    """Return each recipe as YAML, followed by comments that say what is known of its runs.

    Args:
        about: where the runs would be, and how many.
    """
    recipes: dict[str, Recipe] = {}
    comments: dict[str, list[str]] = {}
    for found in forecasts:
        name, recipe = found.recipe.name, found.recipe
        # a comparison has one recipe, with both models as the data decide them
        recipes[name] = with_baseline(recipes[name], recipe) if name in recipes else recipe
        lines = "\n".join(_lines(found, len(forecasts) > 1)).splitlines()
        comments.setdefault(name, []).extend(f"# {line}" for line in lines)
    said = "\n---\n".join("\n".join([to_yaml(recipes[name]).rstrip(), *comments[name]]) for name in recipes)
    return f"{said}\n# {about}; this was a dry run: nothing was trained"


def _lines(found: Forecast, named: bool) -> list[str]:
    epochs, per_epoch, count = found.recipe.epochs, found.updates_per_epoch, found.complexity
    blocks = f"{counted(count.blocks, 'block')}, " if count.blocks else ""
    size = f"{blocks}{counted(count.params, 'parameter')}, {count.macs:,} MACs per {found.unit}"
    memory = found.memory.as_dict()
    terms = [f"{name} {readable_bytes(value)}" for name, value in memory.items() if value and name != "total"]
    missing = f"; activations: {found.activations_unknown}" if found.activations_unknown else ""
    return [
        *([f"{found.label}:"] if named else []),
        f"updates: {per_epoch:,} per epoch, {per_epoch * epochs:,} in {counted(epochs, 'epoch')}",
        found.effective_batch,
        f"model: {size}",
        f"first batch: {found.first_batch}",
        f"memory on each device, predicted: {readable_bytes(memory['total'])} ({', '.join(terms)}{missing}); "
        "not counted: the device's context, memory that its allocator cannot reuse, workspaces of kernels, and loading",
        *found.notices,
    ]
