"""Text as tokens: a tokenizer made from the training split, and each split in a memory-mapped file of tokens.

The tokenizer and the tokens of each split are kept in the cache folder (``STEPSNET_CACHE``, by default
``~/.cache/stepsnet``), each under a name that depends on the text and on how the tokenizer was made, so that runs on
the same text share them. They are written under another name and then renamed, so that writing starts over if it was
interrupted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...errors import UserError, in_a_line
from ...files.cache import cache_folder, locked_entry, say_damaged
from ...files.writing import is_whole, write_sums
from ...output.console import progress_bar
from .sources import Text, held_out, open_texts

__all__ = ["END_OF_TEXT", "Split", "TextData", "UNKNOWN", "load_text", "load_tokenizer"]

END_OF_TEXT = "<|endoftext|>"  # between documents
UNKNOWN = "<unk>"
_CHUNK = 1 << 20  # characters that are tokenized at once
_TOKENIZER, _FACTS, _TOKENS = "tokenizer.json", "facts.json", "tokens.bin"


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
    notices: tuple[str, ...] = ()  # what the user should know of how the text is read


def load_text(
    data: str,
    kind: str,
    vocab_size: int | None,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
    needed: Sequence[str] = ("train", "val"),
    *,
    whole: bool = False,
) -> TextData:
    """Load ``python-docs``, ``text:PATH`` (a file or a folder) or ``hfds:NAME`` as tokens; see sources.py.

    The text itself is read only if its tokens are not in the cache.

    Args:
        kind: the kind of tokenizer: "bpe" with ``vocab_size`` tokens, "characters", or "gpt2".
        tokenizer: a run's, used instead of one made from the training split. Only the splits in ``needed`` are opened
            then.
        holdout: this share of the training text, from its end, becomes the split val, and what was val becomes test.
        needed: splits that the data must have.
        whole: take a single file as the split val, rather than its last tenth.

    Raises:
        UserError: the data do not exist or lack a split, a file is empty or binary, a split has no text, the text is
            too small for the vocabulary, or ``holdout`` is given though the data have a test split of their own.
    """
    texts = open_texts(data, whole=whole)
    if holdout is not None:
        texts = held_out(data, texts, holdout)
    for name in needed:
        if name not in texts.splits:
            known = f"data: {data} has no split {name!r}, expected one of {', '.join(texts.splits)}"
            raise UserError(texts.missing.get(name, known))
    opened = {name: text for name, text in texts.splits.items() if tokenizer is None or name in needed}
    tokenizer = tokenizer or _tokenizer_of(opened["train"], kind, vocab_size)
    splits = {name: _tokens_of(text, f"{name} of {data}", tokenizer) for name, text in opened.items()}
    return TextData(tokenizer, splits, texts.notices)


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises UserError if the file is missing or is not a tokenizer."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"tokenizer: cannot read {path}: {in_a_line(error, 200)}") from None


def _tokenizer_of(text: Text, kind: str, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that is made from a training text."""

    def write(folder: Path) -> None:
        _make_tokenizer(text.read(), kind, vocab_size).save(str(folder / _TOKENIZER))

    return load_tokenizer(_entry(["tokenizer", text.fingerprint, kind, vocab_size], _TOKENIZER, write) / _TOKENIZER)


def _tokens_of(text: Text, name: str, tokenizer: Tokenizer) -> Split:
    """The tokens of a split. Raises UserError, with its name, if it has none."""
    # transformers adds a post_processor to a run's tokenizer; what it puts around a text is not packed
    of_tokenizer = json.loads(tokenizer.to_str()) | {"post_processor": None}
    folder = _entry(["tokens", text.fingerprint, of_tokenizer], _FACTS, partial(_pack, text, name, tokenizer))
    facts = json.loads((folder / _FACTS).read_text())
    tokens = np.memmap(folder / _TOKENS, dtype=facts["dtype"], mode="r", shape=(facts["tokens"],))
    return Split(tokens, facts["characters"], facts["words"])


def _entry(made_from: list[Any], required: str, write: Callable[[Path], None]) -> Path:
    """The folder of an entry of the cache, written under another name and then renamed if it is not there.

    Args:
        made_from: what the entry depends on.
        required: a file that it has.
    """
    layout = 3  # the version of the entries
    name = hashlib.sha256(json.dumps([layout, *made_from]).encode()).hexdigest()[:24]
    folder = cache_folder() / "text" / name
    if is_whole(folder, required):
        return folder
    with locked_entry(folder):  # one process writes, the others wait and read
        if is_whole(folder, required):
            return folder
        say_damaged(folder)
        beside = folder.with_name(f".{folder.name}")
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            write(beside)
            write_sums(beside)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {folder}: {reason}; STEPSNET_CACHE names another folder") from None
    return folder


def _pack(text: Text, name: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokens of a split and their numbers."""
    documents = text.read()
    if not any(document.strip() for document in documents):
        raise UserError(f"data: the split {name} is empty, expected text")
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    count = words = 0
    with (folder / _TOKENS).open("wb") as file:
        chunks = sum(1 for _ in _chunks(documents))
        last = ""  # character before this chunk
        for chunk in progress_bar(_chunks(documents), f"tokens of {name}", chunks):
            tokens = np.asarray(_encode(tokenizer, chunk), dtype=dtype)
            file.write(tokens.tobytes())
            count += len(tokens)
            words += len((chunk or "").split())
            words -= bool(chunk and last and not last.isspace() and not chunk[0].isspace())  # a word that was cut
            last = chunk[-1] if chunk else ""
    characters = sum(map(len, documents))
    facts = {"dtype": np.dtype(dtype).name, "tokens": count, "characters": characters, "words": words}
    (folder / _FACTS).write_text(json.dumps(facts))


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
