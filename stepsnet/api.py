"""What programs and notebooks call: ``stepsnet.train``, ``compare``, ``resume`` and ``load``.

They do what the verbs of the command line do. A recipe is given by its name, as a YAML file or as an object, and
keyword arguments change it: ``train("digits/tiny", epochs=2, model={"args": {"depths": (2, 1, 1)}})``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .engine.interrupt import Interrupted
from .errors import UserError
from .files.reading import yaml_file
from .output.console import choose_display
from .recipes import find_or_read
from .run_folder.folder import CONFIG, kind_of, recipes_of_runs, require_run
from .run_folder.provenance import recorded_command
from .run_folder.resuming import Resume, folder_of
from .runs.compare import compare as run_comparison
from .runs.results import Comparison, Run
from .runs.train import train_run
from .settings.config import Recipe
from .settings.consent import require_asked_for, require_or_remember
from .settings.overrides import override_values, read_recipe, to_plain

__all__ = ["compare", "load", "resume", "train"]


def train(
    recipe: str | Path | Recipe, folder: str | Path | None = None, *, resume: Resume = False, **changes: Any
) -> Run:
    """Train a recipe in a folder of its own, as ``stepsnet train`` does.

    An interrupt (Ctrl-C, or a notebook's stop button) ends the training after the current update and a checkpoint,
    from which :func:`resume` goes on. Signals are noticed in the main thread only.

    Args:
        recipe: a name that ``stepsnet recipes`` lists, a YAML file, or a recipe.
        folder: the folder of the run; by default ``runs/`` and the recipe's name or, if the recipe is the
            ``config.yaml`` of a run that is resumed, the folder of that run.
        resume: True resumes the run in this folder, and leaves one that has ended as it is. "auto" also starts a run
            if there is none, so that a cell of a notebook can be run again.
        **changes: new values of the recipe's fields, such as ``epochs=2`` or ``data="folder:PATH"``. A mapping changes
            what it names and leaves the rest, as in ``model={"args": {"depths": (2, 1, 1)}}``; a key with dots does
            the same: ``**{"model.args.depths": (2, 1, 1)}``. A ``ModelSpec`` replaces the whole model.

    Raises:
        UserError: bad input, in one line.
        KeyboardInterrupt: an interrupt, after a checkpoint.
    """
    changed, folder = _recipe_and_folder(recipe, folder, changes, resume)
    with (
        recorded_command(*_command("train", recipe, changed, folder)),
        _interruptible(folder),
        choose_display() as display,
    ):
        train_run(changed, folder, display, resume)
    return Run(folder)


def compare(
    recipe: str | Path | Recipe,
    folder: str | Path | None = None,
    *,
    seeds: Sequence[int] | None = None,
    jobs: int = 2,
    resume: Resume = False,
    **changes: Any,
) -> Comparison:
    """Train a recipe's model and its baseline with the same settings and seeds, as ``stepsnet compare`` does.

    Each run is a process of its own, which does not know what a notebook has registered: that has to be in a module
    that the recipe's ``import`` names.

    Args:
        seeds: a pair of runs is trained for each of them; by default the recipe's seed.
        jobs: the number of runs at once, which share the cores.

    The other arguments are those of :func:`train`.

    Raises:
        UserError: bad input, or a run failed.
        KeyboardInterrupt: an interrupt, after a checkpoint of each run.
    """
    changed, folder = _recipe_and_folder(recipe, folder, changes, resume)
    if seeds is not None and (isinstance(seeds, (str, bytes)) or not isinstance(seeds, Sequence)):
        raise UserError(f"seeds: got {seeds!r}, expected a list of whole numbers")
    with _interruptible(folder), choose_display() as display:
        run_comparison(changed, folder, [changed.seed] if seeds is None else list(seeds), jobs, display, resume)
    return Comparison(folder)


def resume(folder: str | Path, *, jobs: int = 2, **changes: Any) -> Run | Comparison:
    """Resume a run or a comparison from its folder alone, as ``stepsnet resume`` does.

    Args:
        jobs: the number of runs of a comparison at once.
        **changes: ``epochs`` to train for longer; also ``device``, ``workers`` and the like.

    Raises:
        UserError: there is nothing to resume, or a run cannot be resumed with such a change.
        KeyboardInterrupt: as for :func:`train`.
    """
    folder = _path(folder)
    kind = kind_of(folder)
    if kind == "sweep":
        raise UserError(
            f"resume: got {folder}, the folder of a sweep, expected that of a run or a comparison; "
            "`stepsnet resume` continues a sweep"
        )
    if kind == "run":
        require_run(folder)
    recipe = override_values(read_recipe(folder / CONFIG), changes)
    require_asked_for(recipe, folder / CONFIG, _given(changes))
    command = ["resume", str(folder), *_assignments(changes)]
    with recorded_command(*command), _interruptible(folder), choose_display() as display:
        if kind == "run":
            train_run(recipe, folder, display, "extend")
            return Run(folder)
        seeds = sorted({each.seed for each in recipes_of_runs(folder).values()})
        run_comparison(recipe, folder, seeds, jobs, display, "extend")
    return Comparison(folder)


def load(folder: str | Path) -> Run | Comparison:
    """A run, finished or not, or a comparison that has ended.

    Raises:
        UserError: the folder is neither.
    """
    return Run(folder) if kind_of(_path(folder)) == "run" else Comparison(folder)


def _path(folder: Any) -> Path:
    """The folder as a path. Raises UserError for anything that is not the name of a folder."""
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise UserError(f"folder: got {folder!r}, expected the name of a folder")
    return Path(folder)


def _recipe_and_folder(
    recipe: str | Path | Recipe, folder: str | Path | None, changes: Mapping[str, Any], resume: Resume
) -> tuple[Recipe, Path]:
    if not isinstance(recipe, (str, Path, Recipe)):
        raise UserError(f"recipe: got {recipe!r}, expected a name, a YAML file or a Recipe")
    base = recipe if isinstance(recipe, Recipe) else find_or_read(recipe)
    changed = override_values(base, changes)
    file = None if isinstance(recipe, Recipe) else yaml_file(recipe)
    require_or_remember(changed, file, _given(changes))
    return changed, _path(folder) if folder else folder_of(changed, file, resume)


def _command(verb: str, recipe: str | Path | Recipe, changed: Recipe, folder: Path) -> list[str]:
    """The command that does the same, for the summary."""
    if isinstance(recipe, Recipe):
        return [verb, str(folder / CONFIG)]
    before, after = (dict(_flat(to_plain(each))) for each in (find_or_read(recipe), changed))
    changes = {key: value for key, value in after.items() if key not in before or before[key] != value}
    return [verb, str(recipe), *_assignments(changes), "--run", str(folder)]


def _given(changes: Mapping[str, Any]) -> list[str]:
    """The keys whose values the caller has given: within a mapping, only those that it names."""
    return [key for key, value in _flat(changes) if not isinstance(value, Mapping)]


def _assignments(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_as_text(value)}" for key, value in changes.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    try:
        yield
    except Interrupted as stopped:
        if stopped.status == 130:  # SIGINT: Python's own exception for it, which leaves a notebook's kernel alive
            when = str(stopped).partition(";")[0]
            raise KeyboardInterrupt(f"{when}; stepsnet.resume({str(folder)!r}) goes on from there") from None
        raise SystemExit(stopped.status) from stopped
