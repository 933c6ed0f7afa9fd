"""Where text comes from: files, Python's documentation and Hugging Face's data sets.

A source says what a text is by a fingerprint, and reads it only if it has to be tokenized: a training that finds its
tokens in the cache needs no memory for the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UserError, nearest
from ...files.reading import hash_text, read_text
from ..hub import HubName, columns_of, load_hub
from ..splits import SPLITS, check_holdout

__all__ = ["SOURCES", "Text", "Texts", "held_out", "open_texts"]

_LAYOUT = "train.txt, valid.txt and optionally test.txt"
_HELD_OUT = "a recipe with holdout=0.1 validates on the last tenth of train"


@dataclass(frozen=True)
class Text:
    """The documents of one split."""

    fingerprint: str  # two texts with the same one have the same documents
    read: Callable[[], list[str]]


@dataclass(frozen=True)
class Texts:
    splits: dict[str, Text]  # train, val and test, or some of them
    missing: dict[str, str] = field(default_factory=dict)  # for messages: what to say if a split is not there
    notices: tuple[str, ...] = ()  # what the user should know of how the text is read


def open_texts(data: str, *, whole: bool = False) -> Texts:
    """Open ``python-docs``, ``text:PATH``, ``hfds:NAME`` or a path alone. No text is kept in memory.

    Args:
        whole: take a single file as the split val, rather than its last tenth.

    Raises:
        UserError: the data do not exist or cannot be read.
    """
    source, _, path = data.partition(":")
    if data == "python-docs":
        return _python_docs()
    if source not in SOURCES or not path:
        if not Path(data).exists():
            known = ["python-docs", *(f"{source}:…" for source in SOURCES)]
            raise UserError(
                f"data: got {data!r}, expected a text file or one of {', '.join(known)}{nearest(source, known)}"
            )
        source, path = "text", data
    if whole and source == "text" and not Path(path).is_dir():
        text = _file(Path(path))
        return Texts({"val": text}, notices=(f"scored is the whole of {path}; {data}@val is its last tenth",))
    return SOURCES[source](path)


def held_out(data: str, texts: Texts, share: float) -> Texts:
    """Take the end of the training text as val, and val, if there is one, as test.

    The result depends only on the text and the share.

    Raises:
        UserError: the share is not between 0 and 1, or the data have a test split of their own.
    """
    check_holdout(share, data, "test" in texts.splits)
    if not 0 < share < 1:
        raise UserError(f"holdout: got {share}, expected a share of the training text between 0 and 1")
    splits = dict(texts.splits)
    if "val" in splits:
        splits["test"] = splits.pop("val")
    if (train := texts.splits.get("train")) is not None:
        for part, name in enumerate(("train", "val")):
            fingerprint = _fingerprint([train.fingerprint, name, repr(share)])
            splits[name] = Text(fingerprint, partial(_part, train, share, part))
    no_test = f"data: {data} has no test split besides the one to validate on, which holdout takes from train"
    return Texts(splits, {**texts.missing, "test": no_test}, texts.notices)


def _part(text: Text, share: float, part: int) -> list[str]:
    """Part 0: the documents without the last share of their characters; part 1: that share."""
    documents = text.read()
    left = round((1 - share) * sum(map(len, documents)))  # characters
    first: list[str] = []
    last: list[str] = []
    for document in documents:
        first += [document[:left]] if left > 0 else []
        last += [document[max(left, 0) :]] if len(document) > left else []
        left -= len(document)
    return (first, last)[part]


def _python_docs() -> Texts:
    """The help topics of Python's documentation, half a million characters that every installation has."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    val = documents[::10]  # every tenth topic
    train = [text for text in documents if text not in val]
    splits = {"train": train, "val": val}
    return Texts({name: Text(_fingerprint(found), partial(list, found)) for name, found in splits.items()})


def _files(path: str) -> Texts:
    """A folder with train.txt, valid.txt (or val.txt) and optionally test.txt; or a file, whose last tenth is val."""
    root = Path(path)
    if not root.is_dir():
        text = _file(root)
        parts = ("train", "val")
        return Texts({name: Text(_fingerprint([text.fingerprint, name]), partial(_cut, text, name)) for name in parts})
    found: dict[str, Text] = {}
    missing: dict[str, str] = {}
    for split, names in (("train", ["train"]), ("val", ["valid", "val", "validation"]), ("test", ["test"])):
        file = next((root / f"{name}.txt" for name in names if (root / f"{name}.txt").exists()), None)
        if file:
            found[split] = _file(file)
        missing[split] = f"data: {root} has no {names[0]}.txt, expected {_LAYOUT}"
    missing["val"] += f"; {_HELD_OUT}.txt, and of a single file, text:FILE, the last tenth is for validation"
    return Texts(found, missing)


def _cut(text: Text, split: str) -> list[str]:
    (document,) = text.read()
    cut = int(0.9 * len(document))
    return [document[:cut] if split == "train" else document[cut:]]


def _file(path: Path) -> Text:
    name, at, split = str(path).rpartition("@")
    if at and not path.exists() and Path(name).exists():
        raise UserError(f"data: {name} has no split {split!r}, expected one of {', '.join(SPLITS)}")

    def read() -> list[str]:
        text = read_text(path, "data").replace("\r\n", "\n")
        if not text.strip():
            raise UserError(f"data: {path} is empty, expected text")
        return [text]

    return Text(hash_text(path, "data"), read)


def _hugging_face(path: str) -> Texts:
    """A data set from the hub or from a local folder: ``NAME``, ``NAME:CONFIG`` or ``NAME:CONFIG:COLUMN``.

    If every row of every split is one line with its newline, as in WikiText, the rows of a split are one text;
    otherwise each row is a document.
    """
    asked = HubName.of(path)
    loaded, column = load_hub(asked), asked.column or "text"
    digests: dict[str, str] = {}
    keys: dict[str, str] = {}
    are_lines = True
    for split, names in (("train", ["train"]), ("val", ["validation", "valid", "val"]), ("test", ["test"])):
        if key := next((name for name in names if name in loaded), None):
            keys[split] = key
            digests[split], of_split = _digest(path, loaded[key], column)
            are_lines = are_lines and of_split

    got = f"data: hfds:{path} has the splits {list(loaded)}"
    missing = {"train": f"{got}, expected train", "val": f"{got}, expected validation too; {_HELD_OUT}"}
    splits = {
        split: Text(_fingerprint([digests[split], str(are_lines)]), partial(_rows, loaded[key], column, are_lines))
        for split, key in keys.items()
    }
    as_one = f"hfds:{path}: every row is a line, so the rows of a split are read as one text"
    return Texts(splits, {**missing, "test": f"{got}, expected test too"}, (as_one,) if are_lines else ())


def _rows(rows: Any, column: str, are_lines: bool) -> list[str]:
    documents = [row or "" for row in rows[column]]  # null is empty
    return ["".join(documents)] if are_lines else documents


def _digest(path: str, rows: Any, column: str) -> tuple[str, bool]:
    """The fingerprint of a column of text, and whether each of its rows is a line, with its newline at the end."""
    if column not in rows.column_names or "string" not in str(getattr(rows.features[column], "dtype", "")):
        got = columns_of(rows.features)
        raise UserError(
            f"data: hfds:{path}: got the columns {got}, expected {column}: string (hfds:NAME::COLUMN names another)"
        )
    digest, are_lines = hashlib.sha256(), True
    for batch in rows.select_columns([column]).iter(1000):
        for row in batch[column]:
            content = row or ""  # null is empty
            _add(digest, content)
            are_lines = are_lines and (not content or content.find("\n") == len(content) - 1)
    return digest.hexdigest(), are_lines


SOURCES: dict[str, Callable[[str], Texts]] = {"text": _files, "hfds": _hugging_face}


def _fingerprint(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        _add(digest, part)
    return digest.hexdigest()


def _add(digest: Any, text: str) -> None:
    """Add a text with its length, so that texts that are divided elsewhere give another digest."""
    content = text.encode()
    digest.update(b"%d\0" % len(content) + content)
