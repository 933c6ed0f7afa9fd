"""Run a study. Each run is an ordinary training in a folder of its own, and the study can be resumed at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.update import Diverged
from ..errors import UserError
from ..files.writing import write_atomically
from ..models.grow.spec import with_sources
from ..output.console import Display
from ..run_folder.folder import RECIPES_FOLDER, has_begun, lock_folder
from ..run_folder.provenance import command_line
from ..run_folder.resuming import settle_recipe
from ..runs.launch import Failure, Job, error_of, run_all
from ..settings.config import Recipe
from ..settings.overrides import override, to_yaml
from ..settings.user_modules import module_versions
from .declare import Cell, Study
from .pages import check_folder
from .record import diverged_record, note_criteria, noted_criteria, record_of, write_record
from .results import check_records, check_results, modules_of, read_record
from .run_plan import Planned, check_models, data_of, due, recipe_of

__all__ = ["conduct"]


def conduct(
    study: Study,
    folder: Path,
    results: Path,
    jobs: int,
    display: Display,
    *,
    cells: Sequence[Cell] | None = None,
    data: str | None = None,
    free: tuple[str, ...] = (),
    resume: bool = False,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Tune every cell, run the final seeds at the chosen rate, and score each at its end; ``jobs`` runs at a time.

    A run that diverges is a result. Any other failure is reported at the end: its cell is abandoned, the others go on.

    Args:
        folder: for the runs.
        results: for a JSON file per run that has ended; runs whose file is there are not repeated.
        cells: the cells whose runs are started; by default all.
        data: used in place of the declaration's.
        free: overrides that change no result, such as ``checkpoint_interval=100``.
        after: called whenever a final run has ended, and before failures are raised; its own exceptions are shown as a
            note.

    Raises:
        UserError: the declaration does not hold, a folder is not empty and ``resume`` is False, a result is of other
            settings, or runs failed.
        Interrupted: a signal arrived.
    """
    check_models(study, data)
    if jobs < 1:
        raise UserError(f"--jobs: got {jobs}, expected at least 1")
    for place, option in ((folder, "--run"), (results, "--results")):
        if not resume and place.exists() and any(place.iterdir()):
            raise UserError(f"{option}: {place} is not empty, expected a new folder (--resume runs what is missing)")
    conductor = _Conductor(study, folder, results, display, cells, data, free, after)
    for line in _on_modules(conductor.there.values(), folder):
        display.note(study.name, line)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        check_folder(study, folder)
        conductor.fill()
        if conductor.waiting:
            run_all(conductor.waiting, jobs, display, conductor.ended)
    if conductor.failed:
        if len(conductor.run_here) > len(conductor.failed):
            conductor.tell(study.name)  # what the other runs have shown
        raise error_of(conductor.failed, len(conductor.run_here))


class _Conductor:
    """Tracks what of a study has been run, what is waiting, and what has failed. Takes :func:`conduct`'s arguments."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        results: Path,
        display: Display,
        cells: Sequence[Cell] | None,
        data: str | None,
        free: tuple[str, ...],
        after: Callable[[], None],
    ):
        self.study, self.folder, self.results, self.display = study, folder, results, display
        self.cells, self.data, self.free, self.after = cells, data, free, after
        self.of_all = data_of(study, data)  # the data of all runs
        self.there = check_results(study, results, self.of_all)
        self.command = command_line()
        self.planned: dict[str, Planned] = {}  # all that have been queued here, by name
        self.waiting: list[Job] = []  # from which run_all takes the first
        self.failed: list[Failure] = []
        self.run_here: list[str] = []  # those that have ended, one way or another
        self.noted: set[str] = set()  # lines about results that are left out

    def fill(self) -> None:
        """Queue the runs that can start now and have not, from cells without a failure, the most valuable first."""
        started = self.planned.keys() - {job.name for job in self.waiting}
        self.waiting.clear()
        without = {self.planned[failure.name].cell for failure in self.failed}
        for run in due(self.study, self.there, self.cells):
            if run.name in started or run.cell in without:
                continue
            try:
                self.waiting.append(self._job(run))
            except UserError as error:  # its folder has other settings, or is damaged
                self.run_here.append(run.name)
                self.failed.append(Failure(run.name, 2, str(error)))
                without.add(run.cell)

    def ended(self, job: Job, status: int, said: str) -> None:
        """Record a run, and queue what its result makes due."""
        self.run_here.append(job.name)
        self._look_again()
        if job.name in self.there:
            self._note_recorded(job.name)
        else:
            try:
                self._record(job, status, said)
            except UserError as error:  # such as for a damaged file; the other runs go on
                self.failed.append(Failure(job.name, status or 2, str(error)))
        self.fill()

    def _look_again(self) -> None:
        """Read results that another sweep has added to the folder: rates are chosen by them as by those from here."""
        for file in sorted(self.results.glob("*.json")):
            if file.stem not in self.there:
                try:
                    if record := read_record(file, self.study):
                        self._check(file.stem, record)
                        self.there[file.stem] = record
                except UserError as error:
                    self._note_once(f"left out: {error}")

    def _check(self, name: str, record: Mapping[str, Any]) -> None:
        """Raises UserError if a record does not fit what is there, such as that of a repeated tuning run by which
        another rate would be chosen than that of the final runs."""
        check_records(self.study, self.there | {name: record}, self.of_all)

    def _note_recorded(self, name: str) -> None:
        self.display.note(name, "another sweep has already recorded this run; its record is kept")

    def _note_once(self, line: str) -> None:
        if line not in self.noted:
            self.noted.add(line)
            self.display.note(self.study.name, line)

    def _recipe(self, run: Planned) -> Recipe:
        return override(recipe_of(self.study, run, self.data), self.free)

    def _job(self, run: Planned) -> Job:
        config = self.folder / RECIPES_FOLDER / f"{run.name}.yaml"
        if run.name not in self.planned:
            self.planned[run.name] = run
            recipe = self._recipe(run)
            if has_begun(self.folder / run.name):
                settle_recipe(self.folder / run.name, with_sources(recipe), resume=True)
            write_atomically(config, to_yaml(recipe))
            if run.kind == "final":
                note_criteria(config, self.folder / run.name, self.study, run.cell)
        title = self.study.contender(run.cell.contender).title
        return Job(run.name, title, str(config), str(self.folder / run.name))

    def _record(self, job: Job, status: int, said: str) -> None:
        """Record a run. Raises UserError, and writes nothing, if it failed in another way than by diverging, its folder
        cannot be read, or its record does not fit the others."""
        run = self.planned[job.name]
        recipe = self._recipe(run)
        if status == 0:
            record = record_of(self.study, run, recipe, self.folder / job.name, self.command)
        elif status == Diverged.status:
            record = diverged_record(self.study, run, recipe, self.folder / job.name, said, self.command)
        else:
            raise UserError(said)
        record |= noted_criteria(Path(job.config))
        self._check(job.name, record)
        if not write_record(self.results, record):
            file = self.results / f"{job.name}.json"
            other = read_record(file, self.study)
            if other is None:
                raise UserError(f"results: {file} is not the record of a run, expected no other file of this name")
            self._check(job.name, other)
            record = other
            self._note_recorded(job.name)
        self.there[job.name] = record
        if run.kind == "final":
            self.tell(job.name)

    def tell(self, name: str) -> None:
        """Call ``after``. Its errors are only noted: the pages are written again after the next run."""
        try:
            self.after()
        except Exception as error:
            self.display.note(name, f"no page: {error}")


def _on_modules(records: Iterable[Mapping[str, Any]], folder: Path) -> list[str]:
    """A line for each user module that has changed since some of the runs were made.

    Args:
        folder: that of the runs; if their own folders in it stay, they give the same results again.
    """
    of_study = modules_of(records)
    lines, now = [], module_versions(of_study)
    for name, versions in of_study.items():
        if name in now and (others := sum(count for of_run, count in versions.items() if {*of_run} != {now[name]})):
            lines.append(
                f"{others} of the results were made, at least in part, with different content of the module {name}; "
                "they are kept. If what they use of it has changed, remove their files from the results and the "
                f"folders of these runs from {folder} to run them again"
            )
    return lines
