"""`stepsnet grow`: train the network of a finished run further, as the first step of a wider StepsNet."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output.terminal import say
from .options import add_run_options, integers, typed_keys, whole

if TYPE_CHECKING:
    from ..settings.config import Recipe

HELP = "train the network of a run further, as the first step of a wider one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", type=Path, help="the folder of a finished run of a ViT or a LLaMA")
    parser.add_argument(
        "--steps", type=whole(2), help="number of steps, including the existing ones (default: one more than these)"
    )
    parser.add_argument("--widths", metavar="C,C,…", type=integers, help="widths of all steps, with --depths")
    parser.add_argument("--depths", metavar="D,D,…", type=integers, help="blocks of all steps, with --widths")
    parser.add_argument("--heads", metavar="N,N,…", type=integers, help="attention heads of all steps")
    add_run_options(parser)


def run(options: argparse.Namespace) -> None:
    from ..run_folder.folder import CONFIG, folder_name, read_run_recipe
    from ..settings.consent import require_asked_for
    from ..settings.overrides import override
    from .train import train_or_forecast

    recipe = grown_recipe(read_run_recipe(options.source), options.source, _args(options))
    recipe = dataclasses.replace(recipe, data=options.data) if options.data else recipe
    recipe = override(recipe, options.overrides)
    require_asked_for(recipe, options.source / CONFIG, typed_keys(options))
    folder = options.run or Path("runs") / folder_name(recipe.name)
    from ..models.grow.spec import with_sources  # takes seconds

    recipe = with_sources(recipe)  # its mistakes are reported before the settings are printed
    if not options.dry_run:
        say(f"the settings are those of {options.source}: {_settings(recipe)}", error=True)
    train_or_forecast(recipe, folder, options)


def grown_recipe(recipe: Recipe, source: Path, args: dict[str, Any]) -> Recipe:
    """A run's recipe with its network grown: training settings stay, what holds for the old run alone is dropped."""
    from ..settings.config import ModelSpec

    nothing: dict[str, Any] = {"baseline": None, "expected": {}, "earlier_epochs": (), "threads": None}
    nothing |= {key: None for key in ("init", "baseline_init") if hasattr(recipe, key)}
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}-grown",
        title=f"{recipe.name}, grown by wider steps from a finished run",
        model=ModelSpec("grow", {"model": str(source), **args}),
        **nothing,
    )


def _args(options: argparse.Namespace) -> dict[str, Any]:
    given = {"widths": options.widths, "depths": options.depths, "num_heads": options.heads}
    plan = {key: value for key, value in given.items() if value}
    return {**({"steps": options.steps} if options.steps else {}), **({"plan": plan} if plan else {})}


def _settings(recipe: Recipe) -> str:
    return f"{recipe.epochs} epochs, lr {recipe.lr:g}, warmup {recipe.warmup_epochs:g}; key=value changes them"
