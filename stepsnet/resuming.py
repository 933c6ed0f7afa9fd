"""Whether a run may start or go on in a folder, and under which recipe it does."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from .config import MAY_CHANGE_ON_RESUME, Recipe
from .errors import UserError
from .files import remove_temporaries, write_atomically
from .from_data import as_begun
from .overrides import read_recipe, to_plain, to_yaml
from .run_folder import ASSETS, CONFIG, LOCK, RECIPES_FOLDER, folder_name, has_ended, names_in, updates_done
from .run_records import LABEL, read_metrics, read_summary

__all__ = [
    "Resume",
    "can_go_on",
    "check_data",
    "check_length",
    "folder_of",
    "is_past_its_start",
    "open_run_folder",
    "put_aside",
    "require_begun",
    "settle_recipe",
]

# False: a new run. True: the run in the folder goes on, under the recipe that it has. "auto": it goes on, or starts
# where there is none. "extend": it goes on, and its number of epochs may be another.
Resume = bool | Literal["auto", "extend"]

_RESULTS = ("report.html", "figures", "inspection.json", "model.safetensors")
# what a start leaves in a folder before the first update
_OF_A_START = {CONFIG, LOCK, LABEL, "metrics.jsonl", "processes.jsonl", "checkpoints", "tensorboard", "wandb"}
_OF_A_START |= {"tracker.txt", *ASSETS}


def folder_of(recipe: Recipe, file: Path | None, resume: Resume) -> Path:
    """Where a recipe is trained when no folder is named: in ``runs/``, by its name.

    Args:
        file: that the recipe was read from. A run goes on where its ``config.yaml`` is.
    """
    of_run = (LOCK, "metrics.jsonl", "checkpoints")
    if resume and file and file.name == CONFIG and any((file.parent / name).exists() for name in of_run):
        return file.parent
    return Path("runs") / folder_name(recipe.name)


def settle_recipe(folder: Path, recipe: Recipe, resume: Resume, is_grid: bool = False) -> Recipe:
    """Find out whether a recipe can be trained in a folder. Nothing is written.

    Args:
        is_grid: of a comparison, which has ``recipes/``.

    Returns:
        The recipe to train: with what the run that is there has decided where the recipe leaves it open, its threads,
        and the lengths that its schedule had. A start that came to no update has decided nothing.

    Raises:
        UserError: the folder holds something else, another recipe, or nothing to resume.
    """
    names = names_in(folder)
    if CONFIG in names and is_grid != (RECIPES_FOLDER in names):
        kind = "a run" if is_grid else "a comparison"
        raise UserError(f"--run: {folder} is that of {kind}; `stepsnet resume {folder}` goes on with it")
    if can_go_on(folder):
        if resume:
            return _continued(folder, recipe, resume)
        raise UserError(f"--run: {folder} is not empty, expected a new folder (--resume continues the run in it)")
    if CONFIG not in names and names - ({RECIPES_FOLDER} if is_grid else set()):
        raise UserError(f"--run: {folder} is not empty, expected a new folder (nothing in it is overwritten)")
    if not names:
        require_begun(folder, resume)
    return recipe


def require_begun(folder: Path, resume: Resume) -> None:
    """Raises UserError where resuming alone was asked for, and no run was ever started in a folder.

    One that was stopped before its first file has left its lock, and is resumed from its beginning.
    """
    if resume and resume != "auto" and not (folder.is_dir() and any(folder.iterdir())):
        raise UserError(
            f"--resume: there is no run in {folder}, expected its folder (without --resume a run is started; "
            "--auto-resume starts or resumes)"
        )


def can_go_on(folder: Path) -> bool:
    """Whether a run or a comparison was started in a folder, and there is more of it than a start without an update.

    After such a start, any recipe is trained there from its beginning.
    """
    names = names_in(folder)
    return CONFIG in names and not _is_untrained(folder, names)


def is_past_its_start(folder: Path) -> bool:
    """Whether a run has checkpoints or has ended, and needs the weights that its recipe starts from no more."""
    return updates_done(folder) > 0 or has_ended(folder)


def _is_untrained(folder: Path, names: set[str]) -> bool:
    """Whether a run was started here that came to no update, as one that failed at its start; it has left its lock."""
    if not (folder / LOCK).exists() or updates_done(folder) or not names <= _OF_A_START:
        return False
    return not any(line["step"] and line["kind"] != "diverged" for line in read_metrics(folder))


def _clear_failed_start(folder: Path) -> None:
    """Remove the files that a start which came to no update has left, maybe that of another recipe or label.

    Folders stay, and so do the faults that it has recorded. ``config.yaml`` stays until it is replaced, so that a kill
    in between leaves what is a start of a run.
    """
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name in _OF_A_START - {LOCK, CONFIG} and not path.is_dir():
                path.unlink()
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None


def _continued(folder: Path, recipe: Recipe, resume: Resume) -> Recipe:
    """The recipe under which the run in a folder goes on. Raises UserError where it is not this one's."""
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

    Checked before anything is written, since a mismatch with a finished run would never surface later. A finished run
    may lack a valid checkpoint; an unfinished run that has checkpoints needs a valid one.
    """
    from .checkpoint import latest

    try:
        checkpoint, _ = latest(folder / "checkpoints")
    except UserError:
        if not has_ended(folder, recipe):  # a finished run needs none of them any more
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
    if (folder / "model.safetensors").exists():  # of a published run: a new training's would replace them
        raise UserError(
            f"--resume: {folder} has trained weights and no checkpoint to go on from, expected the folder of a run "
            "that was stopped"
        )


def open_run_folder(folder: Path, recipe: Recipe, resume: Resume = False, is_grid: bool = False) -> Recipe:
    """As :func:`settle_recipe`; and ``config.yaml`` is written. The caller holds the folder's lock.

    The results of a run that now gets other epochs are put aside in ``epochs-N/``.
    """
    resolved = settle_recipe(folder, recipe, resume, is_grid)
    if folder.is_dir():
        remove_temporaries(folder)
    goes_on = bool(resume) and can_go_on(folder)
    if not goes_on:
        _clear_failed_start(folder)
    config = folder / CONFIG
    is_over = has_ended(folder, resolved)  # what it was trained with stays as it is
    if not (config.exists() and (is_over or (goes_on and to_plain(read_recipe(config)) == to_plain(resolved)))):
        write_atomically(config, to_yaml(resolved))
    if not is_over and (summary := read_summary(folder)):
        # summary.json is moved last: while it is there, a move that was killed is repeated
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
