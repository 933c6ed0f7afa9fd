"""Language models that train anywhere in minutes, with characters or a small vocabulary."""

from __future__ import annotations

import dataclasses

from ..config import LanguageRecipe, ModelSpec
from .wikitext103 import EMBEDDING_SCALE, wikitext103

__all__ = ["RECIPES"]

_SCALE = {"embedding_scale": EMBEDDING_SCALE}


def python_docs_tiny() -> LanguageRecipe:
    """A small Steps-Transformer on Python's own help topics: needs no file, a minute or two.

    `stepsnet train python-docs/tiny`
    """
    args = {**_SCALE, "vocab_size": 1024, "max_position_embeddings": 256}
    return dataclasses.replace(
        wikitext103(),
        name="python-docs/tiny",
        model=ModelSpec("steps_transformer", {**args, "widths": (64, 96, 128), "depths": (4, 2, 2)}),
        baseline=ModelSpec("steps_transformer", {**args, "widths": (128,), "depths": (4,)}),
        data="python-docs",
        vocab_size=1024,
        seq_len=64,
        batch_size=16,
        epoch_updates=100,
        epochs=4,
        lr=2e-3,
        warmup_epochs=0.5,
        min_lr=2e-4,
        amp_dtype="float32",
    )


def tinyshakespeare_shallow() -> LanguageRecipe:
    """8 narrow layers on tinyshakespeare's characters, against 4 layers of width 128 at the same compute.

    `stepsnet compare tinyshakespeare/shallow --data text:FILE`. The baseline is nanoGPT's setting for a CPU (4 layers
    of width 128, 64 characters, 12 sequences, 2,000 updates, rate 1e-3), which reports a validation loss of 1.88; its
    layers are GPT-2's, ours LLaMA's.
    """
    args = {**_SCALE, "vocab_size": 67, "max_position_embeddings": 256}
    return dataclasses.replace(
        python_docs_tiny(),
        name="tinyshakespeare/shallow",
        model=ModelSpec(
            "steps_transformer",
            {**args, "widths": (64, 90, 128), "depths": (4, 2, 2), "num_attention_heads": (2, 3, 4)},
        ),
        baseline=ModelSpec(
            "steps_transformer", {**args, "widths": (128,), "depths": (4,), "num_attention_heads": (4,)}
        ),
        data="text:data/tinyshakespeare.txt",
        tokenizer="characters",
        vocab_size=None,
        seq_len=64,
        batch_size=12,
        epoch_updates=250,
        epochs=8,
        lr=1e-3,
        betas=(0.9, 0.99),
        warmup_epochs=0.4,
        min_lr=1e-4,
    )


def tinyshakespeare_deep() -> LanguageRecipe:
    """48 layers in three steps on tinyshakespeare's characters, against 48 layers of one width at the same compute.

    `stepsnet compare tinyshakespeare/deep --data text:FILE`
    """
    base = tinyshakespeare_shallow()
    args = {**_SCALE, "vocab_size": 67, "max_position_embeddings": 256}
    return dataclasses.replace(
        base,
        name="tinyshakespeare/deep",
        model=ModelSpec(
            "steps_transformer",
            {**args, "widths": (36, 52, 72), "depths": (27, 14, 7), "num_attention_heads": (2, 2, 3)},
        ),
        baseline=ModelSpec(
            "steps_transformer", {**args, "widths": (48,), "depths": (48,), "num_attention_heads": (2,)}
        ),
    )


def prose_small() -> LanguageRecipe:
    """A Steps-Transformer of 12 layers on English prose, against 6 layers of width 128 with the same parameters.

    `stepsnet compare prose/small --data text:FOLDER`, with train.txt, valid.txt and test.txt in it: the first pair
    of Table 4 with a third of its widths and a vocabulary of 4,096.
    """
    args = {**_SCALE, "vocab_size": 4096, "max_position_embeddings": 512}
    return dataclasses.replace(
        python_docs_tiny(),
        name="prose/small",
        model=ModelSpec(
            "steps_transformer",
            {**args, "widths": (64, 90, 128), "depths": (6, 3, 3), "num_attention_heads": (2, 3, 4)},
        ),
        baseline=ModelSpec(
            "steps_transformer", {**args, "widths": (128,), "depths": (6,), "num_attention_heads": (4,)}
        ),
        data="text:data/prose",
        vocab_size=4096,
        seq_len=128,
        batch_size=16,
        epoch_updates=250,
        epochs=4,
        lr=2e-3,
        warmup_epochs=0.4,
        min_lr=2e-4,
    )


RECIPES = {
    "python-docs/tiny": python_docs_tiny,
    "tinyshakespeare/shallow": tinyshakespeare_shallow,
    "tinyshakespeare/deep": tinyshakespeare_deep,
    "prose/small": prose_small,
}
