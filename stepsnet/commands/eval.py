"""`stepsnet eval`: score a run, or a checkpoint of any timm or StepsNet model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError

__all__ = ["evaluate_checkpoint", "evaluate_run"]

HELP = "score a run, or a checkpoint of any timm or StepsNet model, on a validation split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or with --model a file of weights")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="how it is scored, such as eval_flip=true")
    parser.add_argument("--data", help="other data than the run's, such as folder:PATH")
    parser.add_argument("--model", metavar="NAME", help="the model that a file of weights is of")
    parser.add_argument("--stride", type=int, help="of a language model: tokens scored in each window")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..metrics import find_metric, format_metric

    if options.model and not options.data:
        raise UserError("eval: --model needs --data, expected such as --data folder:PATH")
    if options.model:
        metrics = evaluate_checkpoint(options.run, options.model, options.data)
    else:
        metrics = evaluate_run(options.run, options.data, options.stride, options.overrides)
    if options.json:
        print(json.dumps(metrics))
    else:
        print(", ".join(f"{find_metric(name).name} {format_metric(name, value)}" for name, value in metrics.items()))


def evaluate_run(
    folder: Path, data: str | None = None, stride: int | None = None, overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Metrics of a run's weights on its validation split, or on that of other data.

    Args:
        stride: of a language model, in place of its recipe's ``eval_stride``.
        overrides: changes to the recipe's fields that begin with ``eval_``, such as ``eval_flip=true``.

    Raises:
        UserError: there is no run, its weights cannot be read, or the data do not fit.
    """
    from ..engine.task import BatchShard
    from ..overrides import override
    from ..run_folder import read_run_recipe
    from ..tasks import build_task
    from ..tasks.prediction import load_trained

    recipe = read_run_recipe(folder)
    if stride is not None:
        if not hasattr(recipe, "seq_len"):
            raise UserError(f"--stride: {folder} is a run of {recipe.task}, expected one of language")
        overrides = [*overrides, f"eval_stride={stride}"]
    for assignment in overrides:
        if not assignment.startswith("eval_"):
            raise UserError(f"eval: got {assignment!r}, expected a key that begins with eval_")
    recipe = override(recipe, overrides)
    model, task = build_task(recipe, data, folder)
    model, device = load_trained(folder, recipe, model)
    return task.evaluate(model, BatchShard(), device)


def evaluate_checkpoint(path: Path, model_name: str, data: str, args: dict[str, Any] | None = None) -> dict[str, float]:
    """Metrics of a checkpoint file of any timm or StepsNet model on a data set's validation split.

    Args:
        path: safetensors or torch file with a state dict, as timm reads them.

    Raises:
        UserError: the file cannot be read or is of another model, or the classes differ.
    """
    import timm.models

    from ..checkpoint import load_into
    from ..config import ClassificationRecipe, ModelSpec
    from ..engine.distributed import pick_device
    from ..engine.task import BatchShard
    from ..tasks import build_task

    recipe = ClassificationRecipe(name="eval", model=ModelSpec(model_name, args or {}), data=data, batch_size=1)
    model, task = build_task(recipe)
    device = pick_device("auto")
    try:
        weights = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # of torch, pickle, safetensors or the file system
        raise UserError(f"checkpoint: cannot read {path}: {' '.join(str(error).split())[:300]}") from None
    load_into(model, weights)
    return task.evaluate(model.to(device).eval(), BatchShard(), device)
