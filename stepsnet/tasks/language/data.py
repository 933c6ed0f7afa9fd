"""Text as tokens: a tokenizer made from the training split, and each split in a memory-mapped file of tokens.

The tokens are kept in the cache folder (``STEPSNET_CACHE``, by default ``~/.cache/stepsnet``) under a name that
depends on the text and the tokenizer, so that runs on the same text share them. They are written under another name
and then renamed, so that writing starts over if it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...errors import UserError, import_extra, in_a_line, nearest
from ...files.cache import cache_folder, locked_entry, say_damaged
from ...files.reading import read_text
from ...files.writing import is_whole, write_sums
from ...output.console import progress_bar
from ..splits import SPLITS, check_holdout

__all__ = ["END_OF_TEXT", "Split", "TextData", "Texts", "UNKNOWN", "load_text", "load_tokenizer"]

END_OF_TEXT = "<|endoftext|>"  # between documents
UNKNOWN = "<unk>"
_CHUNK = 1 << 20  # characters that are tokenized at once
_FACTS = "facts.json"
Texts = dict[str, list[str]]  # documents by split: train, val and perhaps test


@dataclass(frozen=True)
class Split:
    """The tokens of one split, and its numbers of characters and words."""

    tokens: np.ndarray  # uint16 or uint32, memory-mapped
    characters: int
    words: int  # separated by white space


@dataclass(frozen=True)
class TextData:
    tokenizer: Tokenizer
    splits: dict[str, Split]


def load_text(
    data: str,
    kind: str,
    vocab_size: int | None,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
    needed: str = "",
) -> TextData:
    """Load ``python-docs``, ``text:PATH`` (a file or a folder) or ``hfds:NAME`` (or ``hfds:NAME:CONFIG``) as tokens.

    The first 90% of a single file is for training; a folder holds train.txt, valid.txt (or val.txt) and optionally
    test.txt.

    Args:
        kind: the kind of tokenizer: "bpe" with ``vocab_size`` tokens, "characters", or "gpt2".
        tokenizer: used instead of one made from the training split; for example a run's.
        holdout: this share of the training text, from its end, becomes the split val, and what was val becomes test.
        needed: a split that the data must have.

    Raises:
        UserError: the data do not exist or lack the split, a file is empty or binary, a split has no text, the text is
            too small for the vocabulary, or ``holdout`` is given though the data have a test split of their own.
    """
    source, _, path = data.partition(":")
    if data == "python-docs":
        texts = _python_docs()
    elif source in SOURCES and path:
        texts = SOURCES[source](path)
    elif Path(data).exists():
        texts = _files(data)
    else:
        known = ["python-docs", *(f"{source}:…" for source in SOURCES)]
        raise UserError(
            f"data: got {data!r}, expected a text file or one of {', '.join(known)}{nearest(source, known)}"
        )
    if holdout is not None:
        texts = _held_out(data, texts, holdout)
    if needed and needed not in texts:
        raise UserError(f"data: {data} has no split {needed!r}, expected one of {', '.join(texts)}")
    for name, documents in texts.items():
        if not any(document.strip() for document in documents):
            raise UserError(f"data: the split {name} of {data} is empty, expected text")
    entries = cache_folder() / "text"
    folder = entries / _fingerprint(texts, [kind, vocab_size])
    if tokenizer is not None and not _is_of(folder, tokenizer):
        folder = entries / _fingerprint(texts, [tokenizer.to_str()])
    if not is_whole(folder, _FACTS):
        with locked_entry(folder):  # one process writes, the others wait and read
            if not is_whole(folder, _FACTS):
                say_damaged(folder)
                _pack(texts, tokenizer or (lambda: _make_tokenizer(texts["train"], kind, vocab_size)), folder)
    return _open(folder)


def _held_out(data: str, texts: Texts, share: float) -> Texts:
    """Take the end of the training text as val, and val as test; this depends only on the text and the share."""
    check_holdout(share, data, "test" in texts)
    if not 0 < share < 1:
        raise UserError(f"holdout: got {share}, expected a share of the training text between 0 and 1")
    left = round((1 - share) * sum(map(len, texts["train"])))  # characters
    train: list[str] = []
    val: list[str] = []
    for document in texts["train"]:
        train += [document[:left]] if left > 0 else []
        val += [document[max(left, 0) :]] if len(document) > left else []
        left -= len(document)
    return {"train": train, "val": val, "test": texts["val"]}


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises UserError if the file is missing or is not a tokenizer."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"tokenizer: cannot read {path}: {in_a_line(error, 200)}") from None


def _python_docs() -> Texts:
    """The help topics of Python's documentation, half a million characters that every installation has."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    held_out = documents[::10]  # every tenth topic
    return {"train": [text for text in documents if text not in held_out], "val": held_out}


def _files(path: str) -> Texts:
    root = Path(path)
    if root.is_dir():
        found: Texts = {}
        for split, names in (("train", ["train"]), ("val", ["valid", "val", "validation"]), ("test", ["test"])):
            file = next((root / f"{name}.txt" for name in names if (root / f"{name}.txt").exists()), None)
            if file:
                found[split] = [_read(file)]
            elif split != "test":
                raise UserError(
                    f"data: {root} has no {names[0]}.txt, expected train.txt, valid.txt and optionally test.txt; of a "
                    "single file, text:FILE, the last tenth is for validation"
                )
        return found
    text = _read(root)
    cut = int(0.9 * len(text))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def _read(path: Path) -> str:
    name, at, split = str(path).rpartition("@")
    if at and not path.exists() and Path(name).exists():
        raise UserError(f"data: {name} has no split {split!r}, expected one of {', '.join(SPLITS)}")
    text = read_text(path, "data").replace("\r\n", "\n")
    if not text.strip():
        raise UserError(f"data: {path} is empty, expected text")
    return text


def _hugging_face(path: str) -> Texts:
    load_dataset = import_extra("datasets", "data").load_dataset
    name, _, config = path.partition(":")
    try:
        loaded = load_dataset(name, config or None)
    except Exception as error:  # anything that the hub, the network or the files may raise
        raise UserError(f"data: cannot load hfds:{path}: {in_a_line(error, 300)}") from None
    found: Texts = {}
    for split, names in (("train", ["train"]), ("val", ["validation", "valid", "val"]), ("test", ["test"])):
        key = next((name for name in names if name in loaded), None)
        if key:
            if "text" not in loaded[key].column_names:
                raise UserError(
                    f"data: hfds:{path} has the columns {loaded[key].column_names}, expected one named text"
                )
            rows = [row or "" for row in loaded[key]["text"]]  # null is empty
            is_text = all(not row or row.endswith("\n") for row in rows)  # lines, as in WikiText; else documents
            found[split] = ["".join(rows)] if is_text else rows
        elif split != "test":
            raise UserError(f"data: hfds:{path} has the splits {list(loaded)}, expected train and validation")
    return found


SOURCES = {"text": _files, "hfds": _hugging_face}


def _fingerprint(texts: Texts, made_from: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([2, *made_from]).encode())  # 2: the version of the layout
    for name, documents in texts.items():
        digest.update(f"\0{name}\0{len(documents)}".encode())
        for document in documents:
            content = document.encode()
            digest.update(b"%d\0" % len(content) + content)
    return digest.hexdigest()[:24]


def _is_of(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether there is an entry made with this tokenizer, as there is for a run's tokenizer and its own data."""
    try:
        made = load_tokenizer(folder / "tokenizer.json")
    except UserError:
        return False
    one, other = (json.loads(each.to_str()) for each in (made, tokenizer))
    around = {"post_processor": None}  # transformers adds it; what it puts around a text is not packed
    return one | around == other | around


def _pack(texts: Texts, tokenizer: Tokenizer | Callable[[], Tokenizer], folder: Path) -> None:
    """Write the tokenizer and the tokens of every split under another name, and then rename.

    The tokenizer may be a function that makes it.
    """
    beside = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer()
        tokenizer.save(str(beside / "tokenizer.json"))
        dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        facts: dict[str, Any] = {"dtype": np.dtype(dtype).name}
        for name, documents in texts.items():
            count = 0
            with (beside / f"{name}.bin").open("wb") as file:
                chunks = list(_chunks(documents))
                for chunk in progress_bar(chunks, f"tokens of {name}"):
                    tokens = np.asarray(_encode(tokenizer, chunk), dtype=dtype)
                    file.write(tokens.tobytes())
                    count += len(tokens)
            words = sum(len(document.split()) for document in documents)
            facts[name] = {"tokens": count, "characters": sum(map(len, documents)), "words": words}
        (beside / _FACTS).write_text(json.dumps(facts))
        write_sums(beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write {folder}: {reason}; STEPSNET_CACHE names another folder") from None


def _chunks(documents: Sequence[str]) -> Iterator[str | None]:
    """Yield documents in pieces that end at the end of a line, and None between documents."""
    for number, document in enumerate(documents):
        if number:
            yield None
        start = 0
        while start < len(document):
            end = start + _CHUNK
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end  # a line that is longer than a piece is cut
            yield document[start:end]
            start = end


def _encode(tokenizer: Tokenizer, chunk: str | None) -> Iterable[int]:
    if chunk is None:
        end = tokenizer.token_to_id(END_OF_TEXT)
        return [] if end is None else [end]
    return tokenizer.encode(chunk, add_special_tokens=False).ids


def _make_tokenizer(documents: Sequence[str], kind: str, vocab_size: int | None) -> Tokenizer:
    if kind == "characters":
        letters = sorted(set().union(*documents))
        tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate([UNKNOWN, END_OF_TEXT, *letters])}, UNKNOWN))
        tokenizer.add_special_tokens([END_OF_TEXT])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer
    if kind == "gpt2":
        try:
            return Tokenizer.from_pretrained("gpt2")
        except Exception as error:  # whatever the network raises
            raise UserError(f"tokenizer: cannot load gpt2: {in_a_line(error, 200)}") from None
    if vocab_size is None or vocab_size < 257:
        raise UserError(f"vocab_size: got {vocab_size}, expected at least 257 for bpe: every byte and {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chunk for chunk in _chunks(documents) if chunk), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size: got {vocab_size}, expected at most the {tokenizer.get_vocab_size()} that this text gives"
        )
    return tokenizer


def _open(folder: Path) -> TextData:
    facts = json.loads((folder / _FACTS).read_text())
    splits = {
        name: Split(
            np.memmap(folder / f"{name}.bin", dtype=facts["dtype"], mode="r", shape=(found["tokens"],)),
            found["characters"],
            found["words"],
        )
        for name, found in facts.items()
        if name != "dtype"
    }
    return TextData(load_tokenizer(folder / "tokenizer.json"), splits)
