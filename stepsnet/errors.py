"""Bad input: one clear line that names the thing, the value and what was expected, and an exit status."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["UserError", "exit_status", "nearest"]

# packages that only some of the commands need -> the extra of ours that has them
EXTRAS = {
    **dict.fromkeys(
        ("pydantic", "yaml", "rich", "filelock", "sklearn", "matplotlib", "jinja2", "torchmetrics"), "train"
    ),
    "pycocotools": "detection",
    "transformers": "language",
    "tokenizers": "language",
    "datasets": "data",
}


class UserError(Exception):
    """A mistake of the caller's; the command line prints it as one line and exits with status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)", or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def exit_status(run: Callable[[], Any], debug: bool = False) -> int:
    """Run a function and turn what it raises into one line and an exit status; with ``debug`` let it through."""
    try:
        run()
        return 0
    except UserError as error:
        if debug:
            raise
        print(f"stepsnet: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or debug:
            raise
        print(
            f"stepsnet: {package} is not installed, expected `pip install stepsnet[{EXTRAS[package]}]`", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("stepsnet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 141
    except Exception as error:
        status = getattr(error, "status", None)  # a run that a signal stopped
        if status is None or debug:
            raise
        print(f"stepsnet: {error}", file=sys.stderr)
        return status
