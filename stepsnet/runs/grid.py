"""A comparison or a sweep: each of several recipes with each seed, trained in a folder of its own."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..files.writing import remove_temporaries, write_atomically
from ..output.console import Display
from ..run_folder.folder import (
    CONFIG,
    RECIPES_FOLDER,
    folder_name,
    has_begun,
    has_ended,
    lock_folder,
    names_in,
    read_run_recipe,
)
from ..run_folder.records import read_summary
from ..run_folder.resuming import (
    Resume,
    check_data,
    holds_another,
    is_past_its_start,
    open_run_folder,
    put_aside,
    require_begun,
    settle_recipe,
)
from ..settings.config import Recipe
from ..settings.overrides import read_recipe, to_yaml
from .launch import Failure, Job, error_of, run_all, share_of_cores
from .report import report_or_tell

__all__ = [
    "COMPARISON_FILE",
    "Entry",
    "SWEEP_FILE",
    "Trained",
    "have_checkpoints",
    "plan_grid",
    "run_name",
    "train_grid",
]

# the files in a grid's folder that are about all of its runs
COMPARISON_FILE, SWEEP_FILE = "comparison.json", "sweep.json"


@dataclass(frozen=True)
class Entry:
    """One of several recipes that are trained with the same seeds."""

    name: str  # in the names of its runs
    label: str  # what it is called in reports
    recipe: Recipe
    data_counts: Mapping[str, int] | None = None  # see runs/check.py; None if they are not known


@dataclass(frozen=True)
class Trained:
    """The folders of all runs of a grid, including earlier ones, and the failures among those trained now."""

    runs: list[Path]
    failed: list[Failure]
    trained: int

    def summaries(self) -> list[dict[str, Any]]:
        """The summaries of the runs that have ended at the length that their recipe has now."""
        found = []
        for run in self.runs:
            summary = read_summary(run)
            if summary and has_ended(run, read_recipe(run.parent / RECIPES_FOLDER / f"{run.name}.yaml")):
                found.append(summary)
        return found

    def seeds_of_unlike_schedules(self) -> list[int]:
        """The seeds whose runs had their epochs changed at different updates, as when one ended before the other."""
        changed: dict[int, set[tuple[tuple[int, int], ...]]] = {}
        for run in filter(has_begun, self.runs):
            changed.setdefault(_parts_of(run.name)[1], set()).add(read_run_recipe(run).earlier_epochs)
        return sorted(seed for seed, schedules in changed.items() if len(schedules) > 1)

    def write_report(self, page: Path, title: str, display: Display) -> None:
        """Write the page of all runs that have begun; a user's own file in its place is kept.

        Raises:
            UserError: runs have failed.
        """
        if begun := [run for run in self.runs if has_begun(run)]:
            report_or_tell(begun, page, title, partial(display.note, page.parent.name))
        if self.failed:
            raise error_of(self.failed, self.trained)


def train_grid(
    entries: Sequence[Entry],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    display: Display,
    resume: Resume = False,
    recipe: Recipe | None = None,
) -> Trained:
    """Train each entry with each seed in a folder of its own, ``jobs`` at once.

    Runs that have ended under the same recipe are left as they are. A run that fails, such as one that diverges, does
    not keep others from starting. Results of runs that now get other epochs are put aside in ``epochs-N/``.

    Args:
        seeds: for every entry; None: each has that of its recipe.
        resume: as :data:`stepsnet.run_folder.resuming.Resume`, for each run.
        recipe: that of a comparison, to be written as its ``config.yaml``; None for a sweep.

    Raises:
        UserError: the folder is not empty or there is nothing to resume in it, or it holds a run of another recipe or
            of other data.
        Interrupted: a signal arrived.
    """
    plan_grid(entries, folder, seeds, jobs, resume, recipe)  # so that a plan that is refused leaves no folder
    with lock_folder(folder):
        waiting, runs, texts = plan_grid(entries, folder, seeds, jobs, resume, recipe)
        remove_temporaries(folder)
        _write_recipes(folder, texts)
        if recipe:  # config.yaml is written after all recipes, so its presence means that they are complete
            open_run_folder(folder, recipe, resume, is_grid=True)
        lengths = {(read_summary(Path(job.folder)) or {}).get("epochs", 0) for job in waiting}
        if earlier := lengths - {0, *(entry.recipe.epochs for entry in entries)}:
            # what was put aside before stays: if a run failed since, the files here cover runs of several lengths
            names = ["report.html", "figures", COMPARISON_FILE, SWEEP_FILE]
            put_aside(folder, max(earlier), names, replaces=False)
        order = [_entry_part(entry.name) for entry in entries]

        def place(run: Path) -> tuple[int, int]:
            entry, seed = _parts_of(run.name)
            return seed, order.index(entry) if entry in order else len(order)

        every = sorted({*runs, *_there(folder)}, key=place)
        count = len(waiting)
        return Trained(every, run_all(waiting, jobs, display), count)


def plan_grid(
    entries: Sequence[Entry],
    folder: Path,
    seeds: Sequence[int] | None,
    jobs: int,
    resume: Resume = False,
    recipe: Recipe | None = None,
) -> tuple[list[Job], list[Path], dict[str, str]]:
    """Return the jobs that are left, the folders of all runs, and the files of their recipes; nothing is written.

    Raises:
        UserError: for the mistakes that :func:`train_grid` finds before it starts a run.
    """
    _check_folder(folder, resume, recipe, {entry.name for entry in entries} if recipe else None)
    return _plan(entries, folder, seeds, jobs, resume)


def _check_folder(folder: Path, resume: Resume, recipe: Recipe | None, only: set[str] | None) -> None:
    """Raises UserError if the folder is not that of a comparison with ``recipe``, or, if this is None, of a sweep.

    Args:
        only: names of the entries that may be in it; None: any.
    """
    names = names_in(folder)
    runs = [file.stem for file in (folder / RECIPES_FOLDER).glob("*.yaml")]
    allowed = {_entry_part(name) for name in only or ()}
    if only and (other := next((run for run in runs if _parts_of(run)[0] not in allowed), None)):
        raise holds_another(folder, f"a sweep, with the run {other}")
    if recipe:
        settle_recipe(folder, recipe, resume, is_grid=True)
    elif CONFIG in names:
        raise holds_another(folder, "a run or a comparison")
    elif names and RECIPES_FOLDER not in names:
        raise UserError(f"--run: {folder} is not empty, expected a new folder or one that holds a sweep")
    elif names and not resume:
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume trains what is missing in it)")
    elif not names:
        require_begun(folder, resume)


def _plan(
    entries: Sequence[Entry], folder: Path, seeds: Sequence[int] | None, jobs: int, resume: Resume
) -> tuple[list[Job], list[Path], dict[str, str]]:
    """Plan as :func:`plan_grid` does, in a folder that has been checked."""
    own = [(entry, entry.recipe.seed) for entry in entries]
    pairs = own if seeds is None else [(entry, seed) for seed in seeds for entry in entries]
    share = share_of_cores(min(jobs, len(pairs)))
    waiting: list[Job] = []
    runs: list[Path] = []
    texts: dict[str, str] = {}
    for entry, seed in pairs:
        run = folder / run_name(entry.name, seed)
        if run in runs:
            raise UserError(f"name: got {entry.name} twice, expected distinct names: both would be trained in {run}")
        runs.append(run)
        config = folder / RECIPES_FOLDER / f"{run.name}.yaml"
        # kept from the first start on, however few runs are left: the rounding of results depends on it
        threads = entry.recipe.threads or (read_recipe(config).threads if config.exists() else None) or share
        recipe = dataclasses.replace(entry.recipe, baseline=None, seed=seed, threads=threads)
        how: Literal["auto", "extend"] = "extend" if resume == "extend" and run.is_dir() else "auto"
        settle_recipe(run, recipe, how)
        texts[config.name] = to_yaml(recipe)
        if not (has_ended(run, recipe) and (run / "report.html").exists()):
            name = f"{entry.name}, seed {seed}" if len({seed for _, seed in pairs}) > 1 else entry.name
            waiting.append(Job(name, entry.label, str(config), str(run), how, threads, lines_shown=True))
    by_part = {_entry_part(entry.name): entry for entry in entries}
    for run in _there(folder):  # including other seeds, which the results would put beside these
        part, seed = _parts_of(run.name)
        if (of := by_part.get(part)) and run not in runs and has_begun(run):
            own_length = read_recipe(run / CONFIG).epochs
            settle_recipe(run, dataclasses.replace(of.recipe, baseline=None, seed=seed, epochs=own_length), "auto")
        if of and of.data_counts:
            check_data(run, of.data_counts, of.recipe)
    return waiting, runs, texts


def run_name(entry: str, seed: int) -> str:
    """The name of a run's folder in a comparison or a sweep."""
    return f"{_entry_part(entry)}-seed{seed}"


def have_checkpoints(folder: Path, entry: str, seeds: Sequence[int]) -> bool:
    """Whether every run of an entry has checkpoints or has ended, and no longer needs the weights to start from."""
    return all(is_past_its_start(folder / run_name(entry, seed)) for seed in seeds)


def _entry_part(entry: str) -> str:
    return folder_name(entry.lower())


def _parts_of(run: str) -> tuple[str, int]:
    """Split the name of a run's folder into its entry's part and its seed."""
    entry, _, seed = run.rpartition("-seed")
    return entry, int(seed) if seed.isdecimal() else 0


def _there(folder: Path) -> list[Path]:
    """The folders of all runs that were ever planned in a grid's folder."""
    return [folder / file.stem for file in sorted((folder / RECIPES_FOLDER).glob("*.yaml"))]


def _write_recipes(folder: Path, texts: dict[str, str]) -> None:
    """Write the recipes, all at once if there are none: ``stepsnet resume`` takes what it finds for the whole grid."""
    there = folder / RECIPES_FOLDER
    beside = there if there.exists() else folder / f".{RECIPES_FOLDER}.{secrets.token_hex(8)}.tmp"
    for name, text in texts.items():
        write_atomically(beside / name, text)
    if beside != there:
        beside.rename(there)
