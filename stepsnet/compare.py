"""A StepsNet and its baseline under one recipe: the same data, settings and seeds, as processes side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .engine.console import Display
from .engine.train import signals_caught
from .errors import UserError
from .files import write_atomically
from .models.build import build_model
from .recipes.recipe import Recipe, to_yaml
from .report import write_report
from .report.runs import BASELINE, STEPS
from .run import open_folder

__all__ = ["Contender", "check_grid", "compare", "run_all", "summarise", "train_grid"]


class Interrupted(Exception):
    """A signal ended a comparison; its runs wrote checkpoints first."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}; --resume goes on from there")
        self.status = 128 + number


def compare(
    recipe: Recipe, folder: Path, seeds: Sequence[int], jobs: int, display: Display, resume: bool = False
) -> dict[str, Any]:
    """Train both models with every seed, ``jobs`` at once, and write ``comparison.json`` and ``report.html``.

    Each run is an ordinary ``stepsnet train`` in a folder of its own, with its share of the cores; a
    comparison that was stopped is resumed run by run.

    Raises:
        UserError: the recipe has no baseline, the folder is not empty, or a run failed.
        Interrupted: a signal.
    """
    contenders = [Contender("StepsNet", STEPS, recipe), Contender("baseline", BASELINE, recipe.of_baseline())]
    check_grid([contender.recipe for contender in contenders], seeds, jobs)
    open_folder(folder, recipe, resume)
    runs = train_grid(contenders, folder, seeds, jobs, display)
    summary = summarise([json.loads((run / "summary.json").read_text()) for run in runs])
    write_atomically(folder / "comparison.json", json.dumps(summary, indent=2) + "\n")
    write_report(runs, folder / "report.html", f"{recipe.name}: StepsNet and its baseline")
    return summary


@dataclass(frozen=True)
class Contender:
    name: str  # of its runs
    label: str  # of what it is, in reports
    recipe: Recipe


def check_grid(recipes: Sequence[Recipe], seeds: Sequence[int], jobs: int) -> list[nn.Module]:
    """Say a mistake before anything is written or trained; returns the models, on the meta device.

    Raises:
        UserError: too few jobs, seeds that repeat, or a model that cannot be built.
    """
    if jobs < 1 or not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"--jobs and --seeds: got {jobs} and {list(seeds)}, expected at least 1 job and distinct seeds")
    with torch.device("meta"):
        return [build_model(recipe.model) for recipe in recipes]


def train_grid(
    contenders: Sequence[Contender], folder: Path, seeds: Sequence[int], jobs: int, display: Display
) -> list[Path]:
    """Train each contender with each seed in a folder of its own, as processes, ``jobs`` at once; returns the folders.

    What has ended under this very recipe is left as it is.

    Raises:
        UserError: a folder holds a run of another recipe, or a run failed. Interrupted: a signal.
    """
    waiting, runs = [], []
    for seed in seeds:
        for contender in contenders:
            recipe = dataclasses.replace(contender.recipe, baseline=None, seed=seed)
            run = folder / f"{contender.name.lower().replace('/', '-')}-seed{seed}"
            runs.append(run)
            if (run / "summary.json").exists():
                open_folder(run, recipe, resume=True)  # raises where it is of another recipe
                continue
            config = folder / "recipes" / f"{run.name}.yaml"
            write_atomically(config, to_yaml(recipe))
            name = f"{contender.name}, seed {seed}" if len(seeds) > 1 else contender.name
            waiting.append((name, contender.label, config, run))
    if waiting:
        run_all(waiting, jobs, display)
    return runs


def summarise(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, sample standard deviation and the paired difference (StepsNet - baseline) over the seeds."""
    by_label: dict[str, dict[int, dict[str, float]]] = {}
    for summary in summaries:
        by_label.setdefault(summary["label"], {})[summary["seed"]] = summary["metrics"]

    def spread(values: Sequence[float]) -> dict[str, Any]:
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return {"mean": statistics.mean(values), "std": deviation, "values": list(values)}

    first = next(iter(by_label.values()))
    names = [name for name in next(iter(first.values())) if not name.startswith("best_")]
    paired = sorted(by_label["StepsNet"].keys() & by_label["baseline"].keys())
    return {
        "recipe": summaries[0]["recipe"],
        "seeds": paired,
        **{
            label: {name: spread([runs[seed][name] for seed in paired]) for name in names}
            for label, runs in by_label.items()
        },
        "difference": {
            name: spread([by_label["StepsNet"][seed][name] - by_label["baseline"][seed][name] for seed in paired])
            for name in names
        },
    }


Ended = Callable[[str, int, str], bool]  # a run's name, its status and the last that it said -> whether to go on


def run_all(
    waiting: list[tuple[str, str, Path, Path]],
    jobs: int,
    display: Display,
    ended: Ended = lambda name, status, said: status == 0,
) -> None:
    """Run each as ``stepsnet train``, show their events as they come, and stop all when one fails.

    Args:
        waiting: name, label, recipe and folder of each run; ``ended`` may change what is still in it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // min(jobs, len(waiting))))}
    events: queue.Queue[tuple[str, str | None]] = queue.Queue()
    running: dict[str, subprocess.Popen] = {}
    last: dict[str, str] = {}
    failed: list[str] = []
    told: set[subprocess.Popen] = set()

    def start(name: str, label: str, config: Path, run: Path) -> None:
        command = [sys.executable, "-m", "stepsnet", "train", str(config), "--run", str(run), "--resume"]
        process = subprocess.Popen(
            [*command, "--label", label, "--progress", "events"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        running[name] = process

        def forward() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                events.put((name, line))
            events.put((name, None))

        threading.Thread(target=forward, daemon=True).start()

    with signals_caught() as caught:
        try:
            while waiting or running:
                while waiting and len(running) < jobs and not (caught or failed):
                    start(*waiting.pop(0))
                if (caught or failed) and not running:
                    break
                try:
                    name, line = events.get(timeout=0.2)
                except queue.Empty:
                    name, line = "", ""
                if caught or failed:
                    for process in set(running.values()) - told:
                        process.send_signal(signal.SIGINT)  # each ends after its update and a checkpoint
                        told.add(process)
                if name and line is None:
                    status = running.pop(name).wait()
                    if not caught and not ended(name, status, last.get(name, "")):
                        failed.append(name)
                elif line:
                    try:
                        display.show({**json.loads(line), "run": name})
                    except ValueError:
                        last[name] = line.strip()
        finally:
            for process in running.values():
                process.kill()
        if caught:
            raise Interrupted(caught[0])
    if failed:
        raise UserError(f"run {failed[0]} failed: {last.get(failed[0], 'no output')}")
