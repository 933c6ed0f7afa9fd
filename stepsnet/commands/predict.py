"""`stepsnet predict`: use a run: classes of images, what is found in them and where, or a text that goes on."""

from __future__ import annotations

import argparse
import glob
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import UserError
from ..terminal import say

HELP = "print the likeliest classes of images, draw what is in them, or go on with a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("files", metavar="FILE", nargs="*", help="an image, a folder or a pattern")
    parser.add_argument("--prompt", help="the text that a language model goes on with")
    parser.add_argument("--tokens", type=int, default=200, help="how many it generates at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of what it draws (default: 0)")
    parser.add_argument("--top", type=int, default=5, help="classes per image (default: 5)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("predictions"), help="for images that are drawn"
    )
    parser.add_argument("--least", type=float, default=0.5, help="score from which an object is drawn (default: 0.5)")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..tasks import predict
    from ..tasks.prediction import PredictInputs

    if (options.prompt is None) == (not options.files):
        raise UserError("predict: expected images, or --prompt for a language model")
    inputs = PredictInputs(
        files=_expand(options.files),
        prompt=options.prompt,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        top=options.top,
        out=options.out,
        min_score=options.least,
        emit=(lambda text: None) if options.json else partial(say, end="", flush=True),
    )
    predictions = predict(options.run, inputs)
    if options.json:
        say(json.dumps([prediction.record for prediction in predictions]))
    for prediction in predictions:
        if prediction.line and not options.json:
            say(prediction.line)


def _expand(patterns: Sequence[str]) -> list[Path]:
    """Files, the files of folders, and what patterns match."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) and not path.exists() else [pattern]
        if not matches:
            raise UserError(f"predict: nothing matches {pattern}")
        for match in map(Path, matches):
            inside = sorted(file for file in match.iterdir() if file.is_file()) if match.is_dir() else [match]
            if not inside:
                raise UserError(f"predict: the folder {match} is empty")
            found += inside
    return found
