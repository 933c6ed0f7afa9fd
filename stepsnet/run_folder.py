"""The folder of a run: how it is opened and locked, what it holds, and where its weights are.

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``. That of a comparison or a sweep holds a folder for
each run, and the recipe of each in ``recipes/``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from .config import MAY_CHANGE_ON_RESUME, Recipe
from .consent import require_asked_for
from .errors import UserError
from .files import is_temporary, remove_temporaries, sha256, write_atomically
from .from_data import as_begun
from .overrides import read_recipe, to_plain, to_yaml
from .run_records import LABEL, checkpoint_folders, diverged_at, read_metrics, read_summary, step_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ASSETS",
    "RECIPES_FOLDER",
    "Resume",
    "check_data",
    "check_length",
    "check_run_folder",
    "check_there",
    "each_once",
    "find_runs",
    "folder_name",
    "folder_of",
    "has_begun",
    "has_ended",
    "has_weights",
    "how_far",
    "lock_folder",
    "names_in",
    "open_run_folder",
    "put_aside",
    "read_run_recipe",
    "read_weights",
    "require_run",
    "updates_done",
]

# False: a new run. True: the run in the folder goes on, under the recipe that it has. "auto": it goes on, or starts
# where there is none. "extend": it goes on, and its number of epochs may be another.
Resume = bool | Literal["auto", "extend"]

RECIPES_FOLDER = "recipes"
_RESULTS = ("report.html", "figures", "inspection.json", "model.safetensors")
_CONFIG, _LOCK = "config.yaml", ".lock"
_FAULT = re.compile(r"fault-\w+\.txt")  # of the program, recorded in the folder that it met it in (errors.py)
# what the tasks put beside a run's weights, by which others read and build them (``Task.save_assets``)
ASSETS = (
    "classes.json",
    "categories.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modeling_stepsnet.py",
)
# what a start leaves in a folder before the first update
_OF_A_START = {_CONFIG, _LOCK, LABEL, "metrics.jsonl", "processes.jsonl", "checkpoints", "tensorboard", "wandb"}
_OF_A_START |= {"tracker.txt", *ASSETS}


def folder_name(name: str) -> str:
    """What a run of that name is called among others: one folder, whatever the name holds, and not a hidden one."""
    return re.sub(r"[^\w.+=@-]", "-", name).lstrip(".-")[:60] or "run"


def folder_of(recipe: Recipe, file: Path | None, resume: Resume) -> Path:
    """Where a recipe is trained when no folder is named: in ``runs/``, by its name.

    Args:
        file: that the recipe was read from. A run goes on where its ``config.yaml`` is.
    """
    of_run = (_LOCK, "metrics.jsonl", "checkpoints")
    if resume and file and file.name == _CONFIG and any((file.parent / name).exists() for name in of_run):
        return file.parent
    return Path("runs") / folder_name(recipe.name)


def check_run_folder(folder: Path, recipe: Recipe, resume: Resume, is_grid: bool = False) -> Recipe:
    """Find out whether a recipe can be trained in a folder. Nothing is written.

    Args:
        is_grid: of a comparison, which has ``recipes/``.

    Returns:
        The recipe to train: with what the run that is there has decided where the recipe leaves it open, its threads,
        and the lengths that its schedule had.

    Raises:
        UserError: the folder holds something else, another recipe, or nothing to resume.
    """
    names = names_in(folder)
    if _CONFIG in names and is_grid != (RECIPES_FOLDER in names):
        kind = "a run" if is_grid else "a comparison"
        raise UserError(f"--run: {folder} is that of {kind}; `stepsnet resume {folder}` goes on with it")
    if _CONFIG in names and resume:
        return _continued(folder, recipe, resume)
    if _CONFIG in names and not _is_untrained(folder, names):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume continues the run in it)")
    if _CONFIG not in names and names - ({RECIPES_FOLDER} if is_grid else set()):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (nothing in it is overwritten)")
    if not names:
        check_there(folder, resume)
    return recipe


def check_there(folder: Path, resume: Resume) -> None:
    """Raises UserError where resuming alone was asked for, and no run was ever started in a folder.

    One that was stopped before its first file has left its lock, and is resumed from its beginning.
    """
    if resume and resume != "auto" and not (folder.is_dir() and any(folder.iterdir())):
        raise UserError(
            f"--resume: there is no run in {folder}, expected its folder (without --resume a run is started; "
            "--auto-resume starts or resumes)"
        )


def names_in(folder: Path) -> set[str]:
    """What a folder holds besides its lock, recorded faults and what killed processes have left.

    Raises:
        UserError: it cannot be read.
    """
    try:
        names = {path.name for path in folder.iterdir() if not is_temporary(path)}
        return {name for name in names if name != _LOCK and not _FAULT.fullmatch(name)}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None


def _is_untrained(folder: Path, names: set[str]) -> bool:
    """Whether a run was started here that came to no update, as one that failed at its start; it has left its lock."""
    if not (folder / _LOCK).exists() or updates_done(folder) or not names <= _OF_A_START:
        return False
    return not any(line["step"] and line["kind"] != "diverged" for line in read_metrics(folder))


def _clear_failed_start(folder: Path) -> None:
    """Remove the files that a start which came to no update has left, maybe that of another recipe or label.

    Folders stay, and so do the faults that it has recorded.
    """
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name in _OF_A_START and path.name != _LOCK and not path.is_dir():
                path.unlink()
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None


def _continued(folder: Path, recipe: Recipe, resume: Resume) -> Recipe:
    """The recipe under which the run in a folder goes on. Raises UserError where it is not this one's."""
    there = read_recipe(folder / _CONFIG)
    recipe = as_begun(recipe, there)
    theirs, ours = to_plain(there), to_plain(recipe)
    free = MAY_CHANGE_ON_RESUME | {"data", "earlier_epochs"}  # the same data may have moved
    free |= {"epochs"} if resume == "extend" else set()
    for key in ("task", *ours):
        if key not in free and theirs.get(key) != ours[key]:
            hint = ""
            if key == "epochs":
                hint = f" (`stepsnet resume {folder} epochs={ours[key]}` changes its length)"
                if ours[key] < theirs.get(key, 0):  # which was changed since
                    hint = f" (`stepsnet resume {folder}` goes on with it)"
            elif resume == "extend":
                hint = f"; what may change is {', '.join(sorted(free - {'earlier_epochs'}))}"
            raise UserError(f"--run: {folder} holds a run with {key} {theirs.get(key)!r}, got {ours[key]!r}{hint}")
    done = updates_done(folder)
    _check_checkpoints(folder, done, there.epochs != recipe.epochs)
    lines = [line for line in read_metrics(folder) if line["kind"] == "epoch" and line.get("epoch")]
    if lines and there.epochs != recipe.epochs:
        check_length(folder, recipe.epochs, lines[-1]["step"] // lines[-1]["epoch"])
    earlier = there.earlier_epochs
    if done and there.epochs != recipe.epochs:
        until_now = there.epochs_at(done - 1)
        earlier = tuple(entry for entry in earlier if entry[0] < done)
        earlier += ((done, until_now),) if until_now != recipe.epochs else ()
    return dataclasses.replace(recipe, earlier_epochs=earlier, threads=recipe.threads or there.threads)


def check_length(folder: Path, epochs: int, steps_per_epoch: int) -> None:
    """Raises UserError where the run in a folder has already been trained for longer."""
    done = updates_done(folder)
    if done > epochs * steps_per_epoch:
        raise UserError(
            f"epochs: got {epochs}, expected at least {-(-done // steps_per_epoch)}: {folder} has done {done} updates, "
            f"{steps_per_epoch} an epoch"
        )


def check_data(folder: Path, counts: Mapping[str, int], recipe: Recipe) -> None:
    """Raises UserError where data with these counts are not those that the run in a folder has a checkpoint of.

    It comes before anything is written: that a run that has ended is of other data, nobody would find later. One that
    has ended needs no checkpoint that is valid any more; of others one is expected, where there are some.
    """
    from .checkpoint import latest

    try:
        checkpoint, _ = latest(folder / "checkpoints")
    except UserError:
        if not has_ended(folder, recipe):  # which needs none of them any more
            raise
        return
    if checkpoint:
        checkpoint.check_data(counts)


def _check_checkpoints(folder: Path, done: int, extends: bool) -> None:
    """Raises UserError where a run would begin again because its checkpoints were removed."""
    if done or (has_ended(folder) and not extends):
        return
    epochs = [line for line in read_metrics(folder) if line.get("kind") == "epoch"]
    if len(epochs) > 1 or has_ended(folder):  # the first epoch's line comes before the first checkpoint
        raise UserError(f"--resume: {folder} has no checkpoint left to go on from, expected one in checkpoints/")


def open_run_folder(folder: Path, recipe: Recipe, resume: Resume = False, is_grid: bool = False) -> Recipe:
    """As :func:`check_run_folder`; and ``config.yaml`` is written. The caller holds the folder's lock.

    The results of a run that now gets other epochs are put aside in ``epochs-N/``.
    """
    resolved = check_run_folder(folder, recipe, resume, is_grid)
    if folder.is_dir():
        remove_temporaries(folder)
    if not (resume and has_begun(folder)):
        _clear_failed_start(folder)
    config, summary = folder / _CONFIG, read_summary(folder)
    is_over = summary is not None and _is_of(summary, resolved)  # what it was trained with stays as it is
    if not (config.exists() and (is_over or (resume and to_plain(read_recipe(config)) == to_plain(resolved)))):
        write_atomically(config, to_yaml(resolved))
    if summary and not is_over:
        # the last says that something is to be moved
        put_aside(folder, summary["epochs"], [*_RESULTS, "summary.json"])
    return resolved


def put_aside(folder: Path, epochs: int, names: Sequence[str], replaces: bool = True) -> None:
    """Move what is there of these, the results of so many epochs, to ``epochs-N/``. The caller holds the lock.

    Args:
        replaces: False where what is there already is better than what there is now, and this stays in its place.
    """
    aside = folder / f"epochs-{epochs}"
    for name in names:
        if (folder / name).exists() and (replaces or not (aside / name).exists()):
            aside.mkdir(exist_ok=True)
            if (aside / name).is_dir():  # of an earlier time that it had so many
                shutil.rmtree(aside / name)
            os.replace(folder / name, aside / name)


@contextmanager
def lock_folder(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases however the process ends; make the folder if needed.

    Args:
        wait: seconds for which another process may still hold it.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    lock = FileLock(folder / _LOCK, timeout=wait)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"--run: {folder} is in use by a run that is still alive") from None
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror or error}") from None
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):
            error.run_folder = folder  # type: ignore[attr-defined] # where an unforeseen one is recorded
        raise
    finally:
        lock.release()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these, each once: itself, or those within a comparison's, a sweep's or a study's."""
    found: list[Path] = []
    for folder in folders:
        is_a_run = (folder / "metrics.jsonl").exists()  # a comparison's folder has only a config.yaml
        inside = [] if is_a_run else sorted(path.parent for path in folder.glob("*/config.yaml"))
        found += inside or [folder]
    return each_once(found)


def each_once(folders: Sequence[Path]) -> list[Path]:
    """The folders in their order, without those that are one of them under another path."""
    found: dict[Path, Path] = {}
    for folder in folders:
        found.setdefault(folder.resolve(), folder)
    return list(found.values())


def has_begun(folder: Path) -> bool:
    """Whether a run or a comparison was started in a folder."""
    return (folder / _CONFIG).exists()


def updates_done(folder: Path) -> int:
    """After how many updates the latest checkpoint was written; 0 without one."""
    return max([0, *map(step_of, checkpoint_folders(folder / "checkpoints"))])


def has_ended(folder: Path, recipe: Recipe | None = None) -> bool:
    """Whether a run has come to its end: of this recipe's length, where one is given."""
    summary = read_summary(folder)
    return summary is not None and (recipe is None or _is_of(summary, recipe))


def _is_of(summary: Mapping[str, Any], recipe: Recipe) -> bool:
    return summary.get("epochs", recipe.epochs) == recipe.epochs


def require_run(folder: Path) -> None:
    """Raises UserError where a folder is not a run's."""
    if not has_begun(folder):
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")


def read_run_recipe(folder: Path) -> Recipe:
    """Raises UserError where the folder is not a run's, or its model is fetched and the user has not asked for it."""
    require_run(folder)
    recipe = read_recipe(folder / _CONFIG)
    require_asked_for(recipe, folder / _CONFIG, only=["model.", "baseline."])
    return recipe


def has_weights(folder: Path) -> bool:
    """Whether a run has final weights or a checkpoint; they are not read."""
    return (folder / "model.safetensors").exists() or bool(checkpoint_folders(folder / "checkpoints"))


def how_far(folder: Path) -> str | None:
    """How far a run that has not ended is, in words: after update 1 of 132; None of others, and of published ones."""
    from .checkpoint import latest

    if read_summary(folder) is not None:
        return None
    checkpoint, _ = latest(folder / "checkpoints")
    if checkpoint is None:
        return None
    updates = checkpoint.state["data"]["updates an epoch"] * read_run_recipe(folder).epochs
    done = f"after update {checkpoint.state['position']['step']} of {updates}"
    diverged = diverged_at(folder)
    return done if diverged is None else f"{done}, diverged at {diverged}"


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """A run's final weights, or those of its latest valid checkpoint.

    Raises:
        UserError: there are none yet, or they cannot be read, or are not those that the run has written.
    """
    from .checkpoint import latest, load_weights

    final = folder / "model.safetensors"
    if final.exists():
        expected = (read_summary(folder) or {}).get("weights_sha256")
        if expected and sha256(final) != expected:
            raise UserError(
                f"run: {final} does not match its checksum in summary.json: it was damaged or changed since "
                f"(without it, `stepsnet resume {folder}` writes it from the last checkpoint)"
            )
        return load_weights(final)
    checkpoint, _ = latest(folder / "checkpoints")
    if checkpoint is None:
        raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
    return checkpoint.weights()
