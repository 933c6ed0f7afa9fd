"""`stepsnet recipes`: what can be trained."""

from __future__ import annotations

import argparse
import json

HELP = "list the recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..recipes import recipes

    listed = {name: (make.__doc__ or "").split("\n")[0] for name, make in recipes().items()}
    if options.json:
        print(json.dumps(listed))
        return
    for name, text in listed.items():
        print(f"{name:<{max(map(len, listed))}} {text}")
