"""Many runs as processes side by side: the parent's threads and queue, and what each child runs.

A child is ``python -m stepsnet.runs.launch``. It reads one :class:`Job`, a line of JSON, from its standard input and
writes what it reports, a JSON object per line, to its standard output. Its standard input stays open for as long as the
parent lives: when it closes, however the parent has ended, the child stops as after SIGTERM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Fault, UserError, exit_status

if TYPE_CHECKING:
    from ..config import Recipe
    from ..console import Display
    from ..run_folder import Resume

__all__ = ["Contender", "Job", "plan_grid", "run_all", "run_name", "train_grid"]


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
    resume: Literal["auto", "extend"] = "auto"
    threads: int | None = None  # None: an equal share of the cores
    told: bool = False  # what is to be said before the training has been said


Ended = Callable[[Job, int, str], bool]


def train_grid(
    contenders: Sequence[Contender],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    display: Display,
    resume: Resume = False,
    recipe: Recipe | None = None,
) -> list[Path]:
    """Train each contender with each seed in a folder of its own, ``jobs`` at once; returns the folders.

    What has ended under this very recipe is left as it is.

    Args:
        seeds: of every contender; None: each has that of its recipe.
        resume: as of a run (run_folder.py).
        recipe: of a comparison, to be written as its ``config.yaml``.

    Raises:
        UserError: the folder is not empty or there is nothing to resume in it, it holds a run of another recipe, or a
            run failed. Interrupted: a signal.
    """
    from ..files import remove_temporaries
    from ..run_folder import lock_folder, open_run_folder

    plan_grid(contenders, folder, seeds, jobs, resume, recipe)
    with lock_folder(folder):
        waiting, runs, texts = plan_grid(contenders, folder, seeds, jobs, resume, recipe)
        remove_temporaries(folder)
        _write_recipes(folder, texts)
        if recipe:  # where this is, every recipe is
            open_run_folder(folder, recipe, resume, is_grid=True)
        run_all(waiting, jobs, display)
    return runs


def plan_grid(
    contenders: Sequence[Contender],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    resume: Resume = False,
    recipe: Recipe | None = None,
) -> tuple[list[Job], list[Path], dict[str, str]]:
    """The jobs that are left, the folders of all runs, and the files of their recipes; nothing is written.

    Raises:
        UserError: the mistakes that :func:`train_grid` finds before it starts a run.
    """
    _check_folder(folder, resume, recipe, {contender.name for contender in contenders} if recipe else None)
    return _plan(contenders, folder, seeds, jobs, resume)


def _check_folder(folder: Path, resume: Resume, recipe: Recipe | None, only: set[str] | None) -> None:
    """Raises UserError where the folder is not that of a comparison with ``recipe``, or else of a sweep.

    Args:
        only: the contenders that may be in it.
    """
    from ..run_folder import RECIPES, check_run_folder, check_there, names_in

    names = names_in(folder)
    runs = [file.stem for file in (folder / RECIPES).glob("*.yaml")]
    allowed = {run_name(name, 0) for name in only or ()}
    if only and (other := next((run for run in runs if re.sub(r"\d+$", "0", run) not in allowed), None)):
        raise UserError(f"--run: {folder} is that of a sweep, with {other}; `stepsnet resume {folder}` goes on with it")
    if recipe:
        check_run_folder(folder, recipe, resume, is_grid=True)
    elif "config.yaml" in names:
        raise UserError(f"--run: {folder} is that of a run or a comparison; `stepsnet resume {folder}` goes on with it")
    elif names and RECIPES not in names:
        raise UserError(f"--run: {folder} is not empty, expected a new folder or that of a sweep")
    elif names and not resume:
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume trains what is missing in it)")
    elif not names:
        check_there(folder, resume)


def _plan(
    contenders: Sequence[Contender], folder: Path, seeds: Sequence[int] | None, jobs: int, resume: Resume
) -> tuple[list[Job], list[Path], dict[str, str]]:
    """As :func:`plan_grid`, in a folder that has been checked."""
    from ..overrides import read_recipe, to_yaml
    from ..run_folder import RECIPES, check_run_folder, has_ended

    own = [(contender, contender.recipe.seed) for contender in contenders]
    pairs = own if seeds is None else [(contender, seed) for seed in seeds for contender in contenders]
    share = _share_of_cores(min(jobs, len(pairs)))
    waiting: list[Job] = []
    runs: list[Path] = []
    texts: dict[str, str] = {}
    for contender, seed in pairs:
        run = folder / run_name(contender.name, seed)
        if run in runs:
            raise UserError(f"name: got {contender.name} twice, expected names that differ: both go into {run}")
        runs.append(run)
        config = folder / RECIPES / f"{run.name}.yaml"
        # kept from the first start on, whatever is left to run then: results depend on it in their rounding
        threads = contender.recipe.threads or (read_recipe(config).threads if config.exists() else None) or share
        recipe = dataclasses.replace(contender.recipe, baseline=None, seed=seed, threads=threads)
        how: Literal["auto", "extend"] = "extend" if resume == "extend" and run.is_dir() else "auto"
        check_run_folder(run, recipe, how)
        texts[config.name] = to_yaml(recipe)
        if not (has_ended(run, recipe) and (run / "report.html").exists()):
            name = f"{contender.name}, seed {seed}" if len({seed for _, seed in pairs}) > 1 else contender.name
            waiting.append(Job(name, contender.label, str(config), str(run), how, threads, told=True))
    return waiting, runs, texts


def run_name(contender: str, seed: int) -> str:
    """The name of a run's folder in a comparison or a sweep."""
    from ..run_folder import folder_name

    return f"{folder_name(contender.lower())}-seed{seed}"


def _write_recipes(folder: Path, texts: dict[str, str]) -> None:
    """All at once where there are none: ``stepsnet resume`` takes those that are there for the whole grid."""
    from ..files import write_atomically
    from ..run_folder import RECIPES

    there = folder / RECIPES
    beside = there if there.exists() else folder / f".{RECIPES}.{secrets.token_hex(8)}.tmp"
    for name, text in texts.items():
        write_atomically(beside / name, text)
    if beside != there:
        beside.rename(there)


def _share_of_cores(processes: int) -> int:
    """Threads of each of so many processes: as many as OMP_NUM_THREADS says, but no more than an equal share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share, asked = max(1, cores // processes), os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share


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
        self.share = _share_of_cores(jobs)
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
            env={**os.environ, "OMP_NUM_THREADS": str(job.threads or self.share)},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # of one that has already ended
            process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            process.stdin.flush()
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
            process = self.running.pop(name)
            status = self.statuses[name] = process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            if status < 0:
                self.last_line[name] = f"it was killed by {signal.Signals(-status).name}"
            if status:
                self.display.show({"run": name, "kind": "end"})
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


def _run_job() -> Any:
    from ..overrides import read_recipe
    from ..provenance import recorded_command
    from .train import train_run

    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    folder = Path(job.folder)
    with recorded_command("train", job.config, "--run", job.folder):
        return train_run(read_recipe(Path(job.config)), folder, _events(), job.resume, job.label, job.told)


def _stop_with_parent() -> None:
    """Wait for the end of the standard input, past Python's own buffer, which would be locked at the exit."""
    with suppress(OSError):
        os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _events() -> Display:
    from ..console import Events
    from ..terminal import OutputLost

    class EventsWhileHeard(Events):
        """A parent that is gone is no reason to leave an update without its checkpoint."""

        def show(self, event: dict[str, Any]) -> None:
            with suppress(OutputLost, BrokenPipeError):
                super().show(event)

    return EventsWhileHeard()


if __name__ == "__main__":
    sys.exit(exit_status(_run_job))
