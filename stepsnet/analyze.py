"""Analyses of a run, on its validation split: what the paper's Tables 6 and 7 ask of a trained network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .analysis.interventions import drop_each, drop_steps, mask_paths
from .engine.task import Share
from .run import recipe_of, trained_model
from .tasks.setup import set_up

__all__ = ["analyze_drop", "analyze_mask", "render_rows"]


def analyze_mask(folder: Path, data: str | None = None) -> list[dict[str, Any]]:
    """Table 6 on a run. Raises UserError where it is no run, or one of a single step."""
    return mask_paths(*_run(folder, data))


def analyze_drop(folder: Path, data: str | None = None, each: bool = False) -> list[dict[str, Any]]:
    """Table 7 on a run, or each single block's share. Raises UserError as above."""
    return (drop_each if each else drop_steps)(*_run(folder, data))


def render_rows(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table: what was done, then the metrics."""
    done = [key for key in rows[0] if key not in ("metrics", "blocks")]
    metrics = list(rows[0]["metrics"])
    lines = [
        "| " + " | ".join([*done, *metrics]).replace("_", " ") + " |",
        "|" + "---|" * len(done) + "---:|" * len(metrics),
    ]
    for row in rows:
        cells = [str(row[key]) for key in done] + [f"{row['metrics'][key]:.4g}" for key in metrics]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _run(folder: Path, data: str | None) -> tuple[nn.Module, Callable[[nn.Module], dict[str, float]]]:
    recipe = recipe_of(folder)
    setup = set_up(recipe, data)
    model, device = trained_model(folder, recipe, setup.model)
    return model, lambda model: setup.task.evaluate(model, Share(), device)
