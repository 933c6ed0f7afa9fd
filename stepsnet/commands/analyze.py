"""`stepsnet analyze`: analyses of runs on their validation split: Fig. 2 with its numbers, and Tables 6 and 7."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files.writing import dump_json
from ..output.markdown import markdown_table
from ..output.summary_stats import format_mean_std
from ..output.terminal import say
from .options import add_json_option, place, runs_inside

if TYPE_CHECKING:
    from torch import nn

__all__ = ["analyze_drop", "analyze_mask", "analyze_shortcut", "render_rows"]

HELP = "look inside trained networks: Fig. 2, Table 6 and Table 7 of your own runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=("shortcut", "mask", "drop"),
        help="shortcut: what the residual stream carries by depth; mask, drop: scores without some channels or blocks",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="runs, or folders of comparisons or sweeps")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="with shortcut: folder for the figures (default: analysis)"
    )
    parser.add_argument("--force", action="store_true", help="with shortcut: replace earlier figures in --out")
    parser.add_argument("--each", action="store_true", help="with drop: each single block in turn")
    parser.add_argument("--data", type=place, help="data to use instead of the run's, such as folder:PATH")
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    if options.each and options.kind != "drop":
        raise UserError(f"analyze: got --each with {options.kind}, expected it only with drop")
    for option in ("out", "force"):
        if getattr(options, option) and options.kind != "shortcut":
            raise UserError(f"analyze: got --{option} with {options.kind}, expected it only with shortcut")
    from ..output.console import working
    from ..run_folder.folder import each_once

    folders = each_once([run for folder in options.runs for run in runs_inside(folder)])
    with working(f"analysing {', '.join(map(str, options.runs))}"):
        if options.kind == "shortcut":
            rows = analyze_shortcut(folders, options.out or Path("analysis"), options.data, options.force)
        elif options.kind == "mask":
            rows = analyze_mask(folders, options.data)
        else:
            rows = analyze_drop(folders, options.data, options.each)
    if options.json:
        from ..device import pick_device_of_run
        from ..run_folder.folder import read_run_recipe
        from ..run_folder.provenance import provenance

        where = pick_device_of_run(read_run_recipe(folders[0]).device)
        say(dump_json({"rows": rows, **provenance(where)}))
    else:
        say(render_rows(rows))


Evaluate = Callable[["nn.Module"], dict[str, float]]
Analysis = Callable[["nn.Module", Evaluate], list[dict[str, Any]]]


def analyze_shortcut(
    folders: Sequence[Path], out: Path, data: str | None = None, force: bool = False
) -> list[dict[str, Any]]:
    """Fig. 2 for any runs: what the residual stream carries at each checkpoint that they keep.

    Writes ``stream.png``, ``stream.svg`` and ``stream.csv`` to ``out``.

    Args:
        force: replace existing files of these names.

    Returns:
        One row per checkpoint: the mean, minimum and last value over the blocks, both for γ of the whole stream and
        for γ of the part that a block reads; the correlation of the output with the input; and the ratio of the
        gradient at the first block to that at the last.

    Raises:
        UserError: a folder is not a run or has no valid checkpoint, the files already exist, or ``out`` is not a
            writable folder.
    """
    from ..analysis.block_statistics import StreamMeasurement, summarize
    from ..analysis.residual_stream import measure_stream
    from ..device import pick_device_of_run
    from ..files.writing import require_new, require_writable_folder
    from ..report.residual_stream import LabelledMeasurement, draw_stream
    from ..run_folder.checkpoint import load_into, valid_checkpoints
    from ..run_folder.folder import read_run_recipe
    from ..tasks import build_task

    require_writable_folder(out, "--out")
    require_new([out / f"stream.{kind}" for kind in ("csv", "png", "svg")], force)
    measured, rows = [], []
    for folder, name in zip(folders, _names(folders)):
        recipe = read_run_recipe(folder)
        model, task = build_task(recipe, data, folder)
        device = pick_device_of_run(recipe.device)
        model, batch = model.to(device).eval(), task.example_batch(device)
        checkpoints = valid_checkpoints(folder / "checkpoints")
        if not checkpoints:
            raise UserError(f"analyze: {folder} has no valid checkpoint")
        for checkpoint in checkpoints:
            load_into(model, checkpoint.weights())
            found = measure_stream(model, lambda model: task.loss(model, batch)[0])  # noqa: B023 - called at once
            step = int(checkpoint.state["position"]["step"])
            epoch = step // int(checkpoint.state["data"]["updates an epoch"])
            measurement = StreamMeasurement("epoch_end", epoch, step, found)
            measured.append(LabelledMeasurement(name, measurement))
            rows.append({"run": name, "update": step, "metrics": summarize(found)})
    draw_stream(measured, out)
    return rows


def _names(folders: Sequence[Path]) -> list[str]:
    """Names that tell runs apart: those of their folders or, if these repeat, their paths below a common folder."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(common).as_posix() for path in paths]


def analyze_mask(folders: Sequence[Path], data: str | None = None) -> list[dict[str, Any]]:
    """Table 6 for runs; each metric is a list with one value per seed of a recipe.

    If there are several recipes, each has its own rows, which name its runs. If some runs have ended, those that have
    not are left out.

    Raises:
        UserError: a folder is not a run, or no model has several steps.
    """
    from ..analysis.interventions import mask_paths

    return _over_runs(mask_paths, folders, data)


def analyze_drop(folders: Sequence[Path], data: str | None = None, each: bool = False) -> list[dict[str, Any]]:
    """Table 7 or, with ``each``, the metrics without each block in turn; rows and errors as in :func:`analyze_mask`."""
    from ..analysis.interventions import drop_each, drop_steps

    return _over_runs(drop_each if each else drop_steps, folders, data)


def _over_runs(analysis: Analysis, folders: Sequence[Path], data: str | None) -> list[dict[str, Any]]:
    from ..analysis.interventions import OneStep
    from ..report.load_runs import load_run

    called = dict(zip(folders, _names(folders)))
    loaded = [load_run(folder) for folder in folders]
    any_ended = any(run.summary for run in loaded)
    recipes: dict[str, list[Path]] = {}
    for run in loaded:
        if any_ended and not run.summary:
            say(f"stepsnet: {run.folder} has not ended, and is left out", error=True)
        else:
            recipes.setdefault(run.recipe_key, []).append(run.folder)
    rows: list[dict[str, Any]] = []
    for runs in recipes.values():
        try:
            found = [analysis(*_run(folder, data)) for folder in runs]
        except OneStep as error:
            if len(recipes) == 1:
                raise
            say(f"stepsnet: {', '.join(map(str, runs))}: {error}; left out", error=True)
            continue
        names = {"runs": [called[folder] for folder in runs]} if len(recipes) > 1 else {}
        for same in zip(*found):  # one row from each run
            metrics = {name: [row["metrics"][name] for row in same] for name in same[0]["metrics"]}
            rows.append({**names, **same[0], "metrics": metrics})
    if not rows:
        raise UserError(
            "analyze: none of the models can be taken apart in this way, expected a StepsNet of several steps"
        )
    return rows


def render_rows(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table: what was done, then the metrics; over several runs, mean ± standard deviation."""
    done = [key for key in rows[0] if key not in ("metrics", "blocks")]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    cells = [
        [", ".join(row[key]) if key == "runs" else "—" if row[key] is None else row[key] for key in done]
        + [_formatted(row["metrics"][name]) if name in row["metrics"] else "—" for name in metrics]
        for row in rows
    ]
    headers = [name.replace("_", " ") for name in (*done, *metrics)]
    return markdown_table(headers, cells, "l" * len(done) + "r" * len(metrics))


def _formatted(value: float | list[float]) -> str:
    return format_mean_std(value if isinstance(value, list) else [value], ".4g", std_spec=".2g")


def _run(folder: Path, data: str | None) -> tuple[nn.Module, Evaluate]:
    from ..run_folder.folder import read_run_recipe
    from ..runs.evaluate import scored_run

    return scored_run(folder, read_run_recipe(folder), data)
