"""The folder of a run: how it is locked, what it holds, and where its weights are (resuming.py: who may train in it).

A folder holds ``config.yaml`` (which alone replays the run), ``metrics.jsonl``, ``checkpoints/`` and, at
the end, ``model.safetensors``, ``summary.json`` and ``report.html``. The folder of a comparison or a sweep holds a
folder for each run, and the recipe of each in ``recipes/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from ..errors import UserError
from ..files.writing import LOCKLESS, is_temporary, sha256
from ..settings.config import Recipe
from ..settings.consent import require_asked_for
from ..settings.overrides import read_recipe
from .records import checkpoint_folders, diverged_at, is_checkpoint, read_summary, step_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ASSETS",
    "CONFIG",
    "LOCK",
    "RECIPES_FOLDER",
    "asset",
    "each_once",
    "find_runs",
    "folder_name",
    "has_begun",
    "has_ended",
    "has_weights",
    "how_far",
    "kind_of",
    "lock_folder",
    "names_in",
    "on_unfinished",
    "read_run_recipe",
    "read_weights",
    "recipes_of_runs",
    "refuse_several",
    "require_run",
    "run_of",
    "updates_done",
]

RECIPES_FOLDER = "recipes"
CONFIG, LOCK = "config.yaml", ".lock"
_FAULT = re.compile(r"fault-\w+\.txt")  # a fault of the program, recorded in the folder it was working in (errors.py)
# what the tasks put beside a run's weights, so that others can read them and build the model (``Task.save_assets``)
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


def folder_name(name: str) -> str:
    """The name of a run's folder among others: one folder, whatever the run's name holds, and not a hidden one."""
    return re.sub(r"[^\w.+=@-]", "-", name).lstrip(".-")[:60] or "run"


def names_in(folder: Path) -> set[str]:
    """What a folder holds besides its lock, recorded faults and what killed processes have left.

    Raises:
        UserError: it cannot be read.
    """
    try:
        names = {path.name for path in folder.iterdir() if not is_temporary(path)}
        return {name for name in names if name != LOCK and not _FAULT.fullmatch(name)}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UserError(f"--run: cannot use {folder}: {error.strerror}") from None


@contextmanager
def lock_folder(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases however the process ends; make the folder if needed.

    Args:
        wait: seconds to wait for another process that still holds it.

    Raises:
        UserError: another process holds it, the folder cannot be written, or its disk has no such locks.
    """
    # a soft lock would be a mere file, which a killed process leaves behind for good
    lock = FileLock(folder / LOCK, timeout=wait, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"--run: {folder} is in use by a run that is still alive") from None
    except OSError as error:
        if error.errno in LOCKLESS:
            raise UserError(f"--run: got {folder}, expected a folder on a disk that has locks (flock)") from None
        raise UserError(f"--run: cannot use {folder}: {error.strerror or error}") from None
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):
            error.run_folder = folder  # type: ignore[attr-defined] # where an unforeseen error is recorded
        raise
    finally:
        lock.release()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these, each once: a run's own, or those within a comparison's, a sweep's or a study's."""
    found: list[Path] = []
    for folder in folders:
        is_a_run = (folder / "metrics.jsonl").exists()  # a comparison's folder has only a config.yaml
        inside = [] if is_a_run else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        found += inside or [folder]
    return each_once(found)


def each_once(folders: Sequence[Path]) -> list[Path]:
    """The folders in their order, without those that repeat an earlier one under another path."""
    found: dict[Path, Path] = {}
    for folder in folders:
        found.setdefault(folder.resolve(), folder)
    return list(found.values())


def has_begun(folder: Path) -> bool:
    """Whether a run or a comparison was started in a folder."""
    return (folder / CONFIG).exists()


def updates_done(folder: Path) -> int:
    """The number of updates after which the latest checkpoint was written; 0 without one."""
    return max([0, *map(step_of, checkpoint_folders(folder / "checkpoints"))])


def has_ended(folder: Path, recipe: Recipe | None = None) -> bool:
    """Whether a run has ended or, if a recipe is given, whether it has ended at the recipe's length."""
    summary = read_summary(folder)
    return summary is not None and (recipe is None or _is_of(summary, recipe))


def _is_of(summary: Mapping[str, Any], recipe: Recipe) -> bool:
    return summary.get("epochs", recipe.epochs) == recipe.epochs


def kind_of(folder: Path) -> Literal["run", "comparison", "sweep"]:
    """What was trained in a folder: one run, or several; unlike a sweep, a comparison has a recipe of its own.

    Raises:
        UserError: the folder cannot be read.
    """
    names = names_in(folder)
    if RECIPES_FOLDER not in names:
        return "run"
    return "comparison" if CONFIG in names else "sweep"


def recipes_of_runs(folder: Path) -> dict[str, Recipe]:
    """The recipes of the runs in the folder of a comparison or a sweep, by the names of their folders."""
    return {file.stem: read_recipe(file) for file in sorted((folder / RECIPES_FOLDER).glob("*.yaml"))}


def refuse_several(folder: Path) -> None:
    """Raises UserError for the folder of a comparison or a sweep, when a single run is expected."""
    if folder.is_dir() and (kind := kind_of(folder)) != "run":
        inside = [run.name for run in find_runs([folder]) if run != folder]
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        named = f": {', '.join(inside[:5])}{more}" if inside else ", of which none has begun"
        raise UserError(f"run: got {folder}, which is a {kind}, expected one of the runs in it{named}")


def run_of(folder: Path) -> Path:
    """The folder of a run, if this is that of one of its checkpoints; else the same folder."""
    run = folder.parent.parent
    return run if folder.parent == run / "checkpoints" and is_checkpoint(folder) and has_begun(run) else folder


def asset(run: Path, name: str) -> Path:
    """A file that a run keeps for its use (:data:`ASSETS`); ``run`` may be one of its checkpoints."""
    return run_of(run) / name


def require_run(folder: Path, *, or_checkpoint: bool = False) -> None:
    """Raises UserError if a folder is not that of one run or, if that is allowed, of a checkpoint of one."""
    folder = run_of(folder) if or_checkpoint else folder
    refuse_several(folder)
    if not has_begun(folder):
        raise UserError(f"run: got {folder}, expected the folder of a run (it has no config.yaml)")


def read_run_recipe(folder: Path) -> Recipe:
    """Read a run's recipe, to use the run's own weights; whoever trains on has to ask for pretrained ones too.

    Args:
        folder: that of a run, or of one of its checkpoints.

    Raises:
        UserError: the folder is not that of one run, or its model is fetched and the user has not asked for it.
    """
    require_run(folder, or_checkpoint=True)
    config = asset(folder, CONFIG)
    recipe = read_recipe(config)
    require_asked_for(recipe, config, only=["model.", "baseline."], has_weights=True)
    return recipe


def has_weights(folder: Path) -> bool:
    """Whether a run has final weights or a checkpoint; they are not read."""
    return (folder / "model.safetensors").exists() or bool(checkpoint_folders(folder / "checkpoints"))


def how_far(folder: Path) -> str | None:
    """How far an unfinished run has got, as "after update 1 of 132"; None for others, and for published ones."""
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


def on_unfinished(folder: Path) -> list[str]:
    """A line for whoever uses a checkpoint, or the weights of a run that has not ended; none for other runs."""
    if (run := run_of(folder)) != folder:
        return [f"these are the weights of {run} after update {step_of(folder)}"]
    far = how_far(folder)
    return [f"{folder} has not ended: these are its weights {far}"] if far else []


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """A run's final weights, or those of its latest valid checkpoint; for a checkpoint's folder, its scored weights.

    Raises:
        UserError: there are none yet, they cannot be read, or they are not those that the run has written; or the
            folder is that of several runs.
    """
    from .checkpoint import latest, load_weights

    if run_of(folder) != folder:
        checkpoint, _ = latest(folder.parent, step_of(folder))
        if checkpoint is None:
            raise UserError(f"run: got {folder}, expected a checkpoint that exists")
        return checkpoint.weights()
    final = folder / "model.safetensors"
    if final.exists():
        expected = (read_summary(folder) or {}).get("weights_sha256")
        if expected and sha256(final) != expected:
            raise UserError(
                f"run: {final} does not match its checksum in summary.json: it was damaged or changed since "
                f"(if you remove it, `stepsnet resume {folder}` writes it again from the last checkpoint)"
            )
        return load_weights(final)
    checkpoint, _ = latest(folder / "checkpoints")
    if checkpoint is None:
        refuse_several(folder)
        raise UserError(f"run: {folder} has no weights yet, neither model.safetensors nor a checkpoint")
    return checkpoint.weights()
