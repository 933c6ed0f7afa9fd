"""`stepsnet push`: a run as a repository on the Hugging Face hub, or as a folder with the same content."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..errors import UserError
from ..output.terminal import say

HELP = "publish a run on the Hugging Face hub, for timm, transformers and others, or write the same as a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a finished run")
    parser.add_argument(
        "repo",
        metavar="REPO",
        nargs="?",
        help="USER/NAME; README.md and what an earlier push wrote are replaced by a new commit, other files stay",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write the repository here and upload nothing")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    parser.add_argument(
        "--license", metavar="ID", help="license of the weights, by its name on the hub, such as mit (default: none)"
    )


def run(options: argparse.Namespace) -> None:
    from ..publish.repository import check_repo, create_repo, upload, write_card, write_repository

    if not options.repo and not options.out:
        raise UserError("push: got neither REPO nor --out, expected one of them")
    if options.repo:
        check_repo(options.repo)
    if options.out and options.private:
        raise UserError("--private: got it with --out, which uploads nothing, expected it with REPO alone")
    if options.out:
        publication = write_repository(options.run, options.out)
        repo = options.repo or f"USER/{options.out.resolve().name}"
        write_card(options.run, options.out, publication, repo, options.license)
        say(f"push: wrote {options.out}, and uploaded nothing")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        publication = write_repository(options.run, folder)
        repo = create_repo(options.repo, options.private)  # its full name, which the card states
        write_card(options.run, folder, publication, repo, options.license)
        say(f"push: {upload(folder, repo)}")
