"""Many runs as processes side by side: the parent's threads and queue, and what each child runs.

A child runs this module. It reads one :class:`Job`, a line of JSON, from its standard input and writes what it reports,
a JSON object per line, to its standard output. Its standard input stays open for as long as the parent lives: when it
closes, however the parent has ended, the child stops as after SIGTERM.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Fault, UserError, exit_status
from ..machine import cores

if TYPE_CHECKING:
    from ..output.console import Display

__all__ = ["Failure", "Job", "error_of", "run_all", "share_of_cores", "use_one_gpu"]

_SAID = "stepsnet: "
_LAST_CHECKPOINT = 60.0  # seconds that a child may take to end after its parent was killed or met an error


@dataclass(frozen=True)
class Job:
    """One run of a child process."""

    name: str  # shown while it runs
    label: str
    config: str  # path of the recipe
    folder: str
    resume: Literal["auto", "extend"] = "auto"
    threads: int | None = None  # None: an equal share of the cores
    lines_shown: bool = False  # the lines before the training were shown by whoever starts several runs
    slot: int = 0  # its number among the jobs that run at once; chooses one of several GPUs


@dataclass(frozen=True)
class Failure:
    """A run that has failed: its name, its exit status and its last line of output."""

    name: str
    status: int
    said: str


Ended = Callable[[Job, int, str], None]


def share_of_cores(processes: int) -> int:
    """Return the threads for each of these processes: as OMP_NUM_THREADS says, but no more than an equal share."""
    share, asked = max(1, cores() // processes), os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share


def run_all(
    waiting: list[Job], jobs: int, display: Display, ended: Ended = lambda job, status, said: None
) -> list[Failure]:
    """Run all jobs, ``jobs`` at a time; returns those that failed, which do not keep others from starting.

    Args:
        waiting: may be changed by ``ended``, which is called with each job that has ended, its exit status and its last
            line of output.

    Raises:
        Interrupted: a signal arrived. An exception in ``ended`` ends all jobs, as a signal does.
    """
    return _Launcher(waiting, jobs, display, ended).run() if waiting else []


def error_of(failed: Sequence[Failure], runs: int) -> UserError | Fault:
    """Return the error to raise for those of ``runs`` runs that failed; a fault of the program stays a fault."""
    one = next((failure for failure in failed if failure.status == Fault.status), failed[0])
    said = one.said.removeprefix("stepsnet: ") or "no output"
    which = f"run {one.name} failed" if runs == 1 else f"{len(failed)} of {runs} runs failed, such as {one.name}"
    return (Fault if one.status == Fault.status else UserError)(f"{which}: {said}")


class _Launcher:
    """Starts the jobs, shows their events, and stops all of them when a signal arrives."""

    def __init__(self, waiting: list[Job], jobs: int, display: Display, ended: Ended):
        self.waiting, self.at_once, self.display, self.ended = waiting, jobs, display, ended
        self.share = share_of_cores(jobs)
        # otherwise each run that compiles would start a process for each core of the machine
        self.environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores() // jobs)), **os.environ}
        self.lines: queue.Queue[tuple[str, str | None]] = queue.Queue()  # of a child; None once it has ended
        self.running: dict[str, subprocess.Popen] = {}
        self.jobs: dict[str, Job] = {}
        self.last_line: dict[str, str] = {}
        self.failed: list[Failure] = []
        self.signalled: set[subprocess.Popen] = set()

    def run(self) -> list[Failure]:
        from ..engine.interrupt import Interrupted, catch_signals

        with catch_signals() as caught:
            try:
                while self.running or (self.waiting and not caught):
                    while self.waiting and len(self.running) < self.at_once and not caught:
                        self.start(self.waiting.pop(0))
                    self.handle_next_line(bool(caught))
                    if caught:
                        self.stop_children()
            except KeyboardInterrupt:  # Ctrl-C again: do not wait for checkpoints
                for process in self.running.values():
                    process.kill()
                raise
            finally:  # also if ``ended`` or ``display`` has raised
                self.end_children()
            if caught:
                raise Interrupted(caught[0])
        return self.failed

    def start(self, job: Job) -> None:
        taken = {self.jobs[name].slot for name in self.running}
        job = dataclasses.replace(job, slot=next(slot for slot in itertools.count() if slot not in taken))
        process = subprocess.Popen(
            _command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",  # a library may print anything
            env={**self.environment, "OMP_NUM_THREADS": str(job.threads or self.share)},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the process has already ended
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
            status = process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            if status < 0:
                self.last_line[name] = f"it was killed by {signal.Signals(-status).name}"
            if status:
                self.display.show({"run": name, "kind": "end"})
            if not interrupted:
                said = self.last_line.get(name, "")
                self.failed += [Failure(name, status, said)] if status else []
                self.ended(self.jobs[name], status, said)
            return
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and "kind" in event:
            self.display.show({**event, "run": name})
        elif line.strip() and not (self.last_line.get(name, "").startswith(_SAID) and not line.startswith(_SAID)):
            self.last_line[name] = line.strip()  # what a library prints after it does not hide what the run said

    def stop_children(self) -> None:
        """Ask all children to stop; each ends after its current update and a checkpoint."""
        for process in set(self.running.values()) - self.signalled:
            process.terminate()
            self.signalled.add(process)

    def end_children(self) -> None:
        """Stop the children that still run, wait for their checkpoints, and kill those that do not end."""
        self.stop_children()
        until = time.monotonic() + _LAST_CHECKPOINT
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()


def _command() -> list[str]:
    """Return the command that starts a run in a process of its own.

    The current folder is not on ``sys.path``: a queue.py there would be taken for Python's. The folder of this package,
    which need not be installed, is at its end.
    """
    program = (
        "import runpy, sys; sys.path.append(sys.argv.pop()); "
        "runpy.run_module('stepsnet.runs.launch', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", program, str(Path(__file__).parents[2])]


def _run_job() -> Any:
    from ..output.console import Events
    from ..run_folder.folder import lock_folder
    from ..run_folder.provenance import recorded_command
    from ..settings.overrides import read_recipe
    from .train import train_run

    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    folder = Path(job.folder)
    events = Events()
    try:
        with lock_folder(folder):
            pass
    except UserError:
        text = f"waiting at most {_LAST_CHECKPOINT:.0f} s for an earlier process to write this run's last checkpoint"
        events.note(job.name, text)
        with lock_folder(folder, wait=_LAST_CHECKPOINT):
            pass
    recipe = read_recipe(Path(job.config))
    if recipe.device in ("auto", "cuda"):
        use_one_gpu(job.slot)
    with recorded_command("train", job.config, "--run", job.folder):
        return train_run(recipe, folder, events, job.resume, job.label, job.lines_shown)


def use_one_gpu(slot: int) -> None:
    """Restrict this process to one of several GPUs; slots that run at once get one each if there are enough."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given is not None else [str(index) for index in range(torch.cuda.device_count())]
    if len(visible) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[slot % len(visible)]  # read when CUDA starts


def _stop_with_parent() -> None:
    """Wait for the end of standard input, bypassing Python's own buffer, which would be locked at exit, and stop."""
    with suppress(OSError):
        os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # a terminal sends Ctrl-C to this process too, but only the parent obeys it: it sends SIGTERM here once, and at a
    # second Ctrl-C it kills this process. Outside of the training loop, obeying both would let SIGTERM, which may come
    # seconds later from a busy parent, interrupt what is tidied up after SIGINT.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.exit(exit_status(_run_job))
