"""Text as tokens: a tokenizer made from the training split, and each split packed once into a memory-mapped file.

What is packed is kept in a cache folder (``STEPSNET_CACHE``, by default ``~/.cache/stepsnet``) under a name that
depends on the text and the tokenizer, written beside and renamed: a packing that was stopped is begun anew, and
runs that share a text share its tokens.
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
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..engine.console import counted
from ..errors import UserError, nearest
from ..files import cache_folder

__all__ = ["Split", "TextData", "Texts", "load_text", "load_tokenizer"]

END_OF_TEXT = "<|endoftext|>"  # between documents
UNKNOWN = "<unk>"
_CHUNK = 1 << 20  # characters tokenized at once
Texts = dict[str, list[str]]  # documents by split: train, val and perhaps test


@dataclass(frozen=True)
class Split:
    """Tokens of one split, and how many characters and words they stand for."""

    tokens: np.ndarray  # uint16 or uint32, memory-mapped
    characters: int
    words: int  # as separated by white space


@dataclass(frozen=True)
class TextData:
    tokenizer: Tokenizer
    splits: dict[str, Split]


def load_text(
    data: str, kind: str, vocab_size: int | None, tokenizer: Tokenizer | None = None, holdout: float | None = None
) -> TextData:
    """Tokens of ``python-docs``, ``text:PATH`` (a file or a folder) or ``hfds:NAME`` (or ``hfds:NAME:CONFIG``).

    A file alone is split at 90%; a folder holds train.txt, valid.txt (or val.txt) and perhaps test.txt.

    Args:
        kind: "bpe" of ``vocab_size``, "characters", or "gpt2".
        tokenizer: one that is there already, as that of a run, in place of one made from the training split.
        holdout: the last share of the training text becomes the split val, and what was val becomes test.

    Raises:
        UserError: data that are not there, an empty or binary file, a split without tokens, a vocabulary that the
            text is too small for, or ``holdout`` where the data have a test split of their own.
    """
    source, _, place = data.partition(":")
    if data == "python-docs":
        texts = _python_docs()
    elif source in SOURCES and place:
        texts = SOURCES[source](place)
    elif Path(data).exists():
        texts = _files(data)
    else:
        known = ["python-docs", *(f"{source}:…" for source in SOURCES)]
        raise UserError(
            f"data: got {data!r}, expected a text file or one of {', '.join(known)}{nearest(source, known)}"
        )
    if holdout is not None:
        texts = _held_out(data, texts, holdout)
    for name, documents in texts.items():
        if not any(document.strip() for document in documents):
            raise UserError(f"data: the split {name} of {data} has no text")
    made_from = [kind, vocab_size] if tokenizer is None else [tokenizer.to_str()]
    place_of = cache_folder() / "text" / _fingerprint(texts, made_from)
    place_of.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place_of}.lock"):  # one process packs, the others find it done
        if not place_of.exists():
            _pack(texts, tokenizer or (lambda: _make_tokenizer(texts["train"], kind, vocab_size)), place_of)
    return _open(place_of)


def _held_out(data: str, texts: Texts, share: float) -> Texts:
    """The end of the training text for val, and val for test: a function of the text alone."""
    if "test" in texts:
        raise UserError(f"holdout: got {share}, but {data} has a test split of its own, expected null")
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
    """Raises UserError where the file is missing or no tokenizer."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library's are bare Exceptions
        raise UserError(f"tokenizer: cannot read {path}: {' '.join(str(error).split())[:200]}") from None


def _python_docs() -> Texts:
    """The help topics of Python's own documentation, which every installation carries: half a million characters."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    held_out = documents[::10]  # every tenth topic
    return {"train": [text for text in documents if text not in held_out], "val": held_out}


def _files(place: str) -> Texts:
    root = Path(place)
    if root.is_dir():
        found: Texts = {}
        for split, names in (("train", ["train"]), ("val", ["valid", "val", "validation"]), ("test", ["test"])):
            path = next((root / f"{name}.txt" for name in names if (root / f"{name}.txt").exists()), None)
            if path:
                found[split] = [_read(path)]
            elif split != "test":
                raise UserError(
                    f"data: {root} has no {names[0]}.txt, expected train.txt, valid.txt and perhaps test.txt"
                )
        return found
    text = _read(root)
    cut = int(0.9 * len(text))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data: {path} is no UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise UserError(f"data: {path} is no text: it has a zero byte at {content.index(0)}")
    if not text.strip():
        raise UserError(f"data: {path} is empty, expected text")
    return text


def _hugging_face(place: str) -> Texts:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("data: hfds needs Hugging Face's datasets, expected `pip install stepsnet[data]`") from None
    name, _, config = place.partition(":")
    try:
        loaded = load_dataset(name, config or None)
    except Exception as error:  # what the hub, the network or the files may raise
        raise UserError(f"data: cannot load hfds:{place}: {' '.join(str(error).split())[:300]}") from None
    found: Texts = {}
    for split, names in (("train", ["train"]), ("val", ["validation", "valid", "val"]), ("test", ["test"])):
        key = next((name for name in names if name in loaded), None)
        if key:
            if "text" not in loaded[key].column_names:
                raise UserError(f"data: hfds:{place} has the columns {loaded[key].column_names}, expected text")
            found[split] = ["".join(loaded[key]["text"])]  # WikiText's lines keep their line ends
        elif split != "test":
            raise UserError(f"data: hfds:{place} has the splits {list(loaded)}, expected train and validation")
    return found


SOURCES = {"text": _files, "hfds": _hugging_face}


def _fingerprint(texts: Texts, made_from: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([1, *made_from]).encode())  # 1: of the layout
    for name, documents in texts.items():
        digest.update(f"\0{name}\0{len(documents)}".encode())
        for document in documents:
            digest.update(document.encode())
    return digest.hexdigest()[:24]


def _pack(texts: Texts, tokenizer: Tokenizer | Callable[[], Tokenizer], place: Path) -> None:
    """Write the tokenizer, made first if need be, and every split's tokens beside ``place``, and rename."""
    beside = place.with_name(f".{place.name}")
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
                for chunk in counted(chunks, f"tokens of {name}"):
                    tokens = np.asarray(_encode(tokenizer, chunk), dtype=dtype)
                    file.write(tokens.tobytes())
                    count += len(tokens)
            words = sum(len(document.split()) for document in documents)
            facts[name] = {"tokens": count, "characters": sum(map(len, documents)), "words": words}
        (beside / "facts.json").write_text(json.dumps(facts))
        beside.rename(place)
    except OSError as error:
        raise UserError(f"data: cannot write {place}: {error.strerror}; STEPSNET_CACHE names another folder") from None


def _chunks(documents: Sequence[str]) -> Iterator[str | None]:
    """Documents in pieces that end at a line's end, and None between documents."""
    for number, document in enumerate(documents):
        if number:
            yield None
        start = 0
        while start < len(document):
            end = start + _CHUNK
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end  # a line longer than a piece is cut
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
        except Exception as error:  # the network's
            raise UserError(f"tokenizer: cannot load gpt2: {' '.join(str(error).split())[:200]}") from None
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


def _open(place: Path) -> TextData:
    facts = json.loads((place / "facts.json").read_text())
    splits = {
        name: Split(
            np.memmap(place / f"{name}.bin", dtype=facts["dtype"], mode="r", shape=(found["tokens"],)),
            found["characters"],
            found["words"],
        )
        for name, found in facts.items()
        if name != "dtype"
    }
    return TextData(load_tokenizer(place / "tokenizer.json"), splits)
