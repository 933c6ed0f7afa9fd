"""Many runs as processes side by side: the parent's threads and queue, and what each child runs.

A child is ``python -m stepsnet.runs.launch``. It reads one :class:`Job` as JSON from its standard input and writes
what it reports, a JSON object per line, to its standard output.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Fault, UserError, exit_status

if TYPE_CHECKING:
    from ..config import Recipe
    from ..console import Display

__all__ = ["Contender", "Job", "run_all", "train_grid"]


@dataclass(frozen=True)
class Contender:
    """A recipe among others that are trained with the same seeds."""

    name: str  # of its runs
    label: str  # of what it is, in reports
    recipe: Recipe


@dataclass(frozen=True)
class Job:
    """One run of a child process."""

    name: str  # shown while it runs
    label: str
    config: str  # path of the recipe
    folder: str
    told: bool = False  # what is to be said before the training has been said


Ended = Callable[[Job, int, str], bool]


def train_grid(
    contenders: Sequence[Contender], folder: Path, seeds: Sequence[int], jobs: int, display: Display
) -> list[Path]:
    """Train each contender with each seed in a folder of its own, ``jobs`` at once; returns the folders.

    What has ended under this very recipe is left as it is.

    Raises:
        UserError: a folder holds a run of another recipe, or a run failed. Interrupted: a signal.
    """
    from ..files import write_atomically
    from ..overrides import to_yaml
    from ..run_folder import folder_name, open_run_folder, read_summary

    waiting: list[Job] = []
    runs: list[Path] = []
    for seed in seeds:
        for contender in contenders:
            recipe = dataclasses.replace(contender.recipe, baseline=None, seed=seed)
            run = folder / f"{folder_name(contender.name.lower())}-seed{seed}"
            if run in runs:
                raise UserError(f"name: got {contender.name} twice, expected names that differ: both go into {run}")
            runs.append(run)
            if read_summary(run):
                open_run_folder(run, recipe, resume=True)  # raises where it is of another recipe
                continue
            config = folder / "recipes" / f"{run.name}.yaml"
            write_atomically(config, to_yaml(recipe))
            name = f"{contender.name}, seed {seed}" if len(seeds) > 1 else contender.name
            waiting.append(Job(name, contender.label, str(config), str(run), told=True))
    run_all(waiting, jobs, display)
    return runs


def run_all(
    waiting: list[Job], jobs: int, display: Display, ended: Ended = lambda job, status, said: status == 0
) -> None:
    """Run all jobs, ``jobs`` at once.

    Args:
        waiting: may be changed by ``ended``, which is called with each job, its exit status and its last line of
            output, and says whether to go on.

    Raises:
        UserError: a run failed. Interrupted: a signal.
    """
    if waiting:
        _Launcher(waiting, jobs, display, ended).run()


class _Launcher:
    """Starts the jobs, shows their events, and stops all of them when one fails or a signal arrives."""

    def __init__(self, waiting: list[Job], jobs: int, display: Display, ended: Ended):
        self.waiting, self.at_once, self.display, self.ended = waiting, jobs, display, ended
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // min(jobs, len(waiting))))}
        self.lines: queue.Queue[tuple[str, str | None]] = queue.Queue()  # of a child; None where it has ended
        self.running: dict[str, subprocess.Popen] = {}
        self.jobs: dict[str, Job] = {}
        self.last_line: dict[str, str] = {}
        self.statuses: dict[str, int] = {}
        self.failed: list[str] = []
        self.told: set[subprocess.Popen] = set()

    def run(self) -> None:
        from ..engine.interrupt import Interrupted, catch_signals

        with catch_signals() as caught:
            try:
                while self.waiting or self.running:
                    stopping = bool(caught or self.failed)
                    if stopping and not self.running:
                        break
                    while self.waiting and len(self.running) < self.at_once and not stopping:
                        self.start(self.waiting.pop(0))
                    self.handle_next_line(bool(caught))
                    if caught or self.failed:
                        self.stop_children()
            finally:
                for process in self.running.values():
                    process.kill()
            if caught:
                raise Interrupted(caught[0])
        if self.failed:
            first = self.failed[0]
            said = self.last_line.get(first, "no output").removeprefix("stepsnet: ")
            raise (Fault if self.statuses[first] == Fault.status else UserError)(f"run {first} failed: {said}")

    def start(self, job: Job) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "stepsnet.runs.launch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",  # a library may print anything
            env=self.environment,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(dataclasses.asdict(job)))
        process.stdin.close()
        self.running[job.name], self.jobs[job.name] = process, job
        threading.Thread(target=self.forward, args=(job.name, process), daemon=True).start()

    def forward(self, name: str, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self.lines.put((name, line))
        finally:
            self.lines.put((name, None))  # whatever happens: the parent waits for it

    def handle_next_line(self, interrupted: bool) -> None:
        try:
            name, line = self.lines.get(timeout=0.2)
        except queue.Empty:
            return
        if line is None:
            status = self.statuses[name] = self.running.pop(name).wait()
            if status < 0:
                self.last_line[name] = f"it was killed by {signal.Signals(-status).name}"
            if not interrupted and not self.ended(self.jobs[name], status, self.last_line.get(name, "")):
                self.failed.append(name)
            return
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and "kind" in event:
            self.display.show({**event, "run": name})
        else:
            self.last_line[name] = line.strip()

    def stop_children(self) -> None:
        """Interrupt all children; each ends after its current update and a checkpoint."""
        for process in set(self.running.values()) - self.told:
            process.send_signal(signal.SIGINT)
            self.told.add(process)


def _run_job(job: Job) -> Any:
    from ..console import Events
    from ..overrides import read_recipe
    from ..provenance import recorded_command
    from .train import train_run

    with recorded_command("train", job.config, "--run", job.folder):
        return train_run(read_recipe(Path(job.config)), Path(job.folder), Events(), True, job.label, job.told)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: _run_job(Job(**json.load(sys.stdin)))))
