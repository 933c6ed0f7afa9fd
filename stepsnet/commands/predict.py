"""`stepsnet predict`: use a run to classify images, to find what is in them and where, or to continue a text."""

from __future__ import annotations

import argparse
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files.writing import dump_json
from ..output.terminal import counted, say
from .options import add_json_option, runs_inside, say_how_far, whole

if TYPE_CHECKING:
    from ..tasks.prediction import PredictInputs, Prediction

HELP = "print the likeliest classes of images, draw what is in them, or continue a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the folder of a run, of one of its checkpoints, of a comparison or a sweep",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="an image, a folder with images at any depth, or a pattern"
    )
    parser.add_argument("--prompt", help="the text that a language model continues")
    parser.add_argument(
        "--tokens", type=whole(1), default=200, help="largest number of tokens to generate (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--top", type=whole(1), default=5, help="classes per image (default: 5)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="for the results, in the same subfolders as the inputs (default: predictions, if images are drawn)",
    )
    parser.add_argument("--force", action="store_true", help="replace files that stepsnet did not write itself")
    parser.add_argument(
        "--least", type=float, default=0.5, help="lowest score of an object that is drawn (default: 0.5)"
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    if (options.prompt is None) == (not options.files):
        raise UserError("predict: expected either images, or --prompt for a language model")
    runs = runs_inside(options.run, or_checkpoint=True)

    from ..tasks import predict  # takes seconds
    from ..tasks.prediction import PredictInputs

    files, in_folders, root = _find(options.files)
    unread: dict[Path, str] = {}

    def leave_out(file: Any, reason: str) -> bool:
        """Leave out an unreadable file found in a folder, as training does; one given by name is an error."""
        if file in in_folders and file not in unread:
            unread[file] = reason
            say(f"stepsnet: predict: left out {file}, which cannot be read: {reason}", error=True)
        return file in in_folders

    inputs = PredictInputs(
        files=files,
        root=root,
        force=options.force,
        prompt=options.prompt,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        top=options.top,
        out=options.out,
        min_score=options.least,
        emit=(lambda text: None) if options.json else partial(say, end="", flush=True),
        leave_out=leave_out,
    )
    for run in runs:
        say_how_far(run)
    if runs != [options.run]:
        _predict_with_each(runs, inputs, options.json)
    else:
        predictions = predict(options.run, inputs)
        if options.json:
            say(dump_json([prediction.record for prediction in predictions]))
        for prediction in predictions:
            if prediction.line and not options.json:
                say(prediction.line)
    if unread:  # said at the end too, where a long list does not hide it
        raise UserError(f"predict: {len(unread)} of {counted(len(files), 'file')} cannot be read; the others are done")


def _find(arguments: Sequence[str]) -> tuple[list[Path], set[Path], Path | None]:
    """The images that files, folders and patterns stand for, each once; those of them that were found only in folders;
    and the deepest folder that holds all of them.

    In folders, files that stepsnet has written itself are skipped.
    """
    from ..tasks.images import find_images
    from ..tasks.outputs import common_folder, without_outputs

    found: list[Path] = []
    by_name: set[Path] = set()
    places: list[Path] = []  # the given folders, and the parents of single files
    for match in _matches(arguments):
        if not match.is_dir():
            found.append(match)
            by_name.add(match.absolute())
            places.append(match.absolute().parent)
            continue
        all_images, others = find_images(match)
        images = without_outputs(all_images)
        if not images:
            has = "only what stepsnet has written" if all_images else _of_other_kinds(others) if others else ""
            got = f"has {has}" if has else "is empty"
            raise UserError(f"predict: the folder {match} {got}, expected images in it or below it")
        if others:
            say(f"stepsnet: {match}: left out {_of_other_kinds(others)}", error=True)
        found += sorted(images, key=_in_order)
        places.append(match)
    files = {file.absolute(): file for file in found}
    in_folders = {file for path, file in files.items() if path not in by_name}
    return list(files.values()), in_folders, common_folder(places) if places else None


def _of_other_kinds(files: Sequence[Path]) -> str:
    return f"{counted(len(files), 'file')} without an image's suffix, such as {files[0].name}"


def _matches(arguments: Sequence[str]) -> Iterator[Path]:
    for argument in arguments:
        if not glob.has_magic(argument) or Path(argument).exists():
            yield Path(argument)
        elif matches := glob.glob(argument, recursive=True):
            yield from sorted(map(Path, matches), key=_in_order)
        else:
            raise UserError(f"predict: nothing matches {argument}")


def _in_order(path: Path) -> list[str | int]:
    """A sort key that puts 2.png before 10.png."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", str(path))]


def _predict_with_each(runs: Sequence[Path], inputs: PredictInputs, as_json: bool) -> None:
    """Predict with each run, which draws into a folder of its own, and compare the answers."""
    from ..tasks import predict

    found: dict[str, list[Prediction]] = {}
    for run in runs:
        if inputs.prompt is not None and not as_json:
            say(f"{run.name}:")
        found[run.name] = predict(run, inputs.into(run.name))
        for prediction in found[run.name]:
            if prediction.line and not as_json:
                say(f"{run.name}: {prediction.line}")
    compared, differ = compare_answers(found)
    if as_json:
        records = [{"run": name, "predictions": [one.record for one in of_run]} for name, of_run in found.items()]
        say(dump_json({"runs": records, "differ": differ}))
    elif compared:
        say(f"the runs differ on {len(differ)} of {compared} files{':' if differ else ''}")
        for one in differ:
            said = [f"{answer} ({', '.join(names)})" for answer, names in one["answers"].items()]
            say(f"{one['file']}: {'; '.join(said)}")


def compare_answers(found: Mapping[str, Sequence[Prediction]]) -> tuple[int, list[dict[str, Any]]]:
    """The number of files that can be compared and, for each on which the runs differ, which give which answer."""
    compared, differ = 0, []
    for of_file in zip(*found.values()):
        answers: dict[str, list[str]] = {}
        for name, prediction in zip(found, of_file):
            answers.setdefault(prediction.answer, []).append(name)
        compared += "" not in answers
        if len(answers) > 1:
            differ.append({"file": of_file[0].input, "answers": answers})
    return compared, differ
