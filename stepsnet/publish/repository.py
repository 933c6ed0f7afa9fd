"""The folder that is published: the model in its library's form, ``config.yaml`` for stepsnet, and the card."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from ..errors import UserError, in_a_line
from ..files.writing import dump_yaml, write_atomically
from ..run_folder.folder import ASSETS, CONFIG, read_run_recipe
from ..run_folder.records import read_summary
from ..tasks import publish
from .card import public_recipe, published, render_card

if TYPE_CHECKING:
    from ..tasks.publication import Publication

# What a push writes, for any kind of model. The next push deletes all of it; any other file is somebody's own.
WRITTEN = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    CONFIG,
    *ASSETS,
)

__all__ = ["WRITTEN", "check_repo", "create_repo", "upload", "write_card", "write_repository"]


def write_repository(run: Path, folder: Path) -> Publication:
    """Write a finished run's model and ``config.yaml`` into a new folder, which ``predict`` takes as a run's folder.

    Raises:
        UserError: ``run`` is not a single run or has not ended, its task is not published, or the folder is not empty.
    """
    recipe = read_run_recipe(run)
    if read_summary(run) is None:
        raise UserError(f"push: {run} has not ended, expected a finished run")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--out: {folder} is not empty, expected a new folder")
    except OSError as error:
        raise UserError(f"--out: cannot use {folder}: {error.strerror}") from None
    try:
        publication = publish(run, recipe, folder)
    except UserError:
        with suppress(OSError):  # a refusal before the first file leaves no empty folder behind
            if is_new:
                folder.rmdir()
        raise
    write_atomically(folder / CONFIG, dump_yaml(public_recipe(published(recipe, publication))))
    for file in folder.glob("*.safetensors"):  # timm and transformers write files that nobody else may read
        file.chmod((folder / CONFIG).stat().st_mode & 0o777)
    return publication


def write_card(run: Path, folder: Path, publication: Publication, repo: str, license: str | None = None) -> None:
    """Write ``README.md``, the model card, into a folder that :func:`write_repository` has written."""
    write_atomically(folder / "README.md", render_card(run, publication, repo, license))


def check_repo(repo: str) -> None:
    """Raises UserError if the hub would not accept ``repo`` as the name of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        said = str(error).split(": ")[0].rstrip(".")
        raise UserError(f"push: got {repo!r}, expected USER/NAME ({said})") from None


def create_repo(repo: str, private: bool) -> str:
    """Create the repository if it does not exist yet; returns its full name, with its owner.

    Raises:
        UserError: there is no network, no login or no permission.
    """
    try:
        return _api().create_repo(repo, private=private, exist_ok=True).repo_id
    except Exception as error:  # whatever the hub, the network and the login raise
        raise UserError(_why(repo, error)) from error


def upload(folder: Path, repo: str) -> str:
    """Upload a folder in place of the files of an earlier push; returns its address.

    The card is replaced too; files that no push writes stay. Raises UserError as :func:`create_repo` does.
    """
    message = "stepsnet push"
    try:
        return str(
            _api().upload_folder(
                repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=list(WRITTEN)
            )
        )
    except Exception as error:
        raise UserError(_why(repo, error)) from error


def _api() -> HfApi:
    return HfApi(library_name="stepsnet", library_version=__version__)


def _why(repo: str, error: Exception) -> str:
    said = in_a_line(error, 300)
    return f"push: cannot upload to {repo}: {said} (`hf auth login` logs in; --out DIR writes the same files here)"
