"""Bad input: one clear line that names the thing, the value and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the caller's; the command line prints it as one line and exits with status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)", or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
