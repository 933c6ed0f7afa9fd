"""Whether a run may start or resume in a folder, and under which recipe."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..errors import UserError
from ..files.writing import remove_temporaries, write_atomically
from ..settings.config import MAY_CHANGE_ON_RESUME, Recipe
from ..settings.from_data import as_begun
from ..settings.overrides import read_recipe, to_plain, to_yaml
from .folder import ASSETS, CONFIG, LOCK, RECIPES_FOLDER, folder_name, has_ended, names_in, updates_done
from .inspection import INSPECTION
from .records import LABEL, read_metrics, read_summary

__all__ = [
    "Resume",
    "can_go_on",
    "check_data",
    "check_length",
    "folder_of",
    "holds_another",
    "is_past_its_start",
    "open_run_folder",
    "put_aside",
    "require_begun",
    "settle_recipe",
]

# False: start a new run. True: resume the run in the folder, under the recipe that it has. "auto": resume it, or start
# one if there is none. "extend": resume it, perhaps with another number of epochs.
Resume = bool | Literal["auto", "extend"]

_RESULTS = ("report.html", "figures", INSPECTION, "model.safetensors")
# what a start leaves in a folder before the first update
_OF_A_START = {CONFIG, LABEL, "metrics.jsonl", "processes.jsonl", "checkpoints", "tensorboard", "wandb"}
_OF_A_START |= {"tracker.txt", *ASSETS}


def folder_of(recipe: Recipe, file: Path | None, resume: Resume) -> Path:
    """The folder in which a recipe is trained if none is given: in ``runs/``, by its name.

    Args:
        file: the file that the recipe was read from. A run is resumed in the folder of its ``config.yaml``.
    """
    of_run = (LOCK, "metrics.jsonl", "checkpoints")
    if resume and file and file.name == CONFIG and any((file.parent / name).exists() for name in of_run):
        return file.parent
    return Path("runs") / folder_name(recipe.name)


def settle_recipe(folder: Path, recipe: Recipe, resume: Resume, is_grid: bool = False) -> Recipe:
    """Find out whether a recipe can be trained in a folder. Nothing is written.

    Args:
        is_grid: whether the recipe is that of a comparison, whose folder has ``recipes/``.

    Returns:
        The recipe to train. A run that is there already fills in what the recipe leaves open, including the threads,
        and the earlier lengths of its schedule. A start that made no update has decided nothing.

    Raises:
        UserError: the folder holds something else, another recipe, or nothing to resume.
    """
    names = names_in(folder)
    if CONFIG in names and is_grid != (RECIPES_FOLDER in names):
        raise holds_another(folder, "a run" if is_grid else "a comparison")
    if can_go_on(folder):
        if resume:
            return _continued(folder, recipe, resume)
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume continues the run in it)")
    if CONFIG not in names and names - ({RECIPES_FOLDER} if is_grid else set()):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (nothing in it is overwritten)")
    if not names:
        require_begun(folder, resume)
    return recipe


def holds_another(folder: Path, what: str) -> UserError:
    """The refusal to train in a folder that holds something else, such as "a sweep"; it says how to continue that."""
    return UserError(f"--run: {folder} holds {what}, expected a new folder (`stepsnet resume {folder}` continues it)")


def require_begun(folder: Path, resume: Resume) -> None:
    """Raises UserError if only resuming was asked for, and no run was ever started in the folder.

    A run that was stopped before its first file has left its lock, and is resumed from the beginning.
    """
    if resume and resume != "auto" and not (folder.is_dir() and any(folder.iterdir())):
        raise UserError(
            f"--resume: there is no run in {folder}, expected the folder of a run (without --resume, a run is started; "
            "--auto-resume starts one or resumes it)"
        )


def can_go_on(folder: Path) -> bool:
    """Whether a run or a comparison was started in a folder and got further than a start without an update.

    After such a start, any recipe may be trained there from the beginning.
    """
    names = names_in(folder)
    return CONFIG in names and not _is_untrained(folder, names)


def is_past_its_start(folder: Path) -> bool:
    """Whether a run has checkpoints or has ended, and no longer needs the weights that its recipe starts from."""
    return updates_done(folder) > 0 or has_ended(folder)


def _is_untrained(folder: Path, names: set[str]) -> bool:
    """Whether a run was started here and made no update, perhaps because it failed; it has left its lock."""
    if not (folder / LOCK).exists() or updates_done(folder) or not names <= _OF_A_START:
        return False
    return not any(line["step"] and line["kind"] != "diverged" for line in read_metrics(folder))


def _clear_failed_start(folder: Path) -> None:
    """Remove the files of a start that made no update, perhaps one with another recipe or label.

    Folders stay, and so do the faults that it has recorded. ``config.yaml`` stays until it is replaced, so that even
    after a kill in between, the folder is that of a run that was started.
    """
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name in _OF_A_START - {CONFIG} and not path.is_dir():
                path.unlink()
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None


def _continued(folder: Path, recipe: Recipe, resume: Resume) -> Recipe:
    """The recipe under which the run in a folder is resumed. Raises UserError if the run has another recipe."""
    there = read_recipe(folder / CONFIG)
    recipe = as_begun(recipe, there)
    theirs, ours = to_plain(there), to_plain(recipe)
    free = MAY_CHANGE_ON_RESUME | {"data", "earlier_epochs"}  # the same data may have moved
    free |= {"epochs"} if resume == "extend" else set()
    for key in ("task", *ours):
        if key not in free and theirs.get(key) != ours[key]:
            hint = ""
            if key == "epochs":
                hint = f" (`stepsnet resume {folder} epochs={ours[key]}` changes its length)"
                if ours[key] < theirs.get(key, 0):  # the length was changed since
                    hint = f" (`stepsnet resume {folder}` continues it)"
            elif resume == "extend":
                hint = f"; only these may change: {', '.join(sorted(free - {'earlier_epochs'}))}"
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
    """Raises UserError if the run in a folder has already been trained for longer."""
    done = updates_done(folder)
    if done > epochs * steps_per_epoch:
        raise UserError(
            f"epochs: got {epochs}, expected at least {-(-done // steps_per_epoch)}: {folder} has done {done} updates, "
            f"{steps_per_epoch} per epoch"
        )


def check_data(folder: Path, counts: Mapping[str, int], recipe: Recipe) -> None:
    """Raises UserError if the run in a folder has a checkpoint of data with other counts than these.

    This is checked before anything is written, since a mismatch with a finished run would never surface later. A
    finished run may lack a valid checkpoint; an unfinished run that has checkpoints needs a valid one.
    """
    from .checkpoint import latest

    try:
        checkpoint, _ = latest(folder / "checkpoints")
    except UserError:
        if not has_ended(folder, recipe):  # a finished run no longer needs any of them
            raise
        return
    if checkpoint:
        checkpoint.check_data(counts)


def _check_checkpoints(folder: Path, done: int, extends: bool) -> None:
    """Raises UserError if a run would begin again because its checkpoints were removed."""
    if done or (has_ended(folder) and not extends):
        return
    epochs = [line for line in read_metrics(folder) if line.get("kind") == "epoch"]
    if len(epochs) > 1 or has_ended(folder):  # the first epoch's line comes before the first checkpoint
        raise UserError(f"--resume: {folder} has no checkpoint left to go on from, expected one in checkpoints/")
    if (folder / "model.safetensors").exists():  # of a published run: those of a new training would replace them
        raise UserError(
            f"--resume: {folder} has trained weights and no checkpoint to go on from, expected the folder of a run "
            "that was stopped"
        )


def open_run_folder(folder: Path, recipe: Recipe, resume: Resume = False, is_grid: bool = False) -> Recipe:
    """Do what :func:`settle_recipe` does, and write ``config.yaml``. The caller holds the folder's lock.

    The results of a run that now gets another number of epochs are put aside in ``epochs-N/``.
    """
    resolved = settle_recipe(folder, recipe, resume, is_grid)
    if folder.is_dir():
        remove_temporaries(folder)
    goes_on = bool(resume) and can_go_on(folder)
    if not goes_on:
        _clear_failed_start(folder)
    config = folder / CONFIG
    is_over = has_ended(folder, resolved)  # then the record of what it was trained with stays
    if not (config.exists() and (is_over or (goes_on and to_plain(read_recipe(config)) == to_plain(resolved)))):
        write_atomically(config, to_yaml(resolved))
    if not is_over and (summary := read_summary(folder)):
        # summary.json is moved last: while it is there, a move that was killed is repeated
        put_aside(folder, summary["epochs"], [*_RESULTS, "summary.json"])
    return resolved


def put_aside(folder: Path, epochs: int, names: Sequence[str], replaces: bool = True) -> None:
    """Move those of these files that exist, the results after ``epochs`` epochs, to ``epochs-N/``.

    The caller holds the lock.

    Args:
        replaces: False if a file that is there already is better than the one to be moved, which then stays.
    """
    aside = folder / f"epochs-{epochs}"
    for name in names:
        if (folder / name).exists() and (replaces or not (aside / name).exists()):
            aside.mkdir(exist_ok=True)
            if (aside / name).is_dir():  # from an earlier time with as many epochs
                shutil.rmtree(aside / name)
            os.replace(folder / name, aside / name)
