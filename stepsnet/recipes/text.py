"""Language models that train anywhere in minutes, with characters or a small vocabulary.

`stepsnet train python-docs/tiny` needs no file; `stepsnet compare tinyshakespeare/shallow --data text:FILE`;
`stepsnet compare prose/small --data text:FOLDER`, with train.txt, valid.txt and test.txt in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..settings.config import ModelSpec
from .table_rows import by_name
from .wikitext103 import WIKITEXT103

__all__ = ["RECIPES"]

# 1 / LLaMA's initializer_range, for StepsNet and baseline alike: σ(z_0) is 1 to begin with. At 0.02 the first step's
# residuals drown the slices that wait (docs/language.md).
_EMBEDDING_SCALE = 50.0


def _transformer(
    vocab_size: int, context: int, widths: Sequence[int], depths: Sequence[int], heads: Sequence[int] | None = None
) -> ModelSpec:
    args = {
        "embedding_scale": _EMBEDDING_SCALE,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "widths": tuple(widths),
        "depths": tuple(depths),
    }
    return ModelSpec("steps_transformer", args | ({"num_attention_heads": tuple(heads)} if heads else {}))


PYTHON_DOCS = dataclasses.replace(
    WIKITEXT103,
    name="python-docs/tiny",
    title="a small Steps-Transformer on Python's own help topics: a minute or two",
    model=_transformer(1024, 256, (64, 96, 128), (4, 2, 2)),
    baseline=_transformer(1024, 256, (128,), (4,)),
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
    score_test=False,
)
# The baseline is nanoGPT's setting for a CPU (4 layers of width 128, 64 characters, 12 sequences, 2,000 updates, rate
# 1e-3), which reports a validation loss of 1.88; its layers are GPT-2's, ours LLaMA's.
SHAKESPEARE = dataclasses.replace(
    PYTHON_DOCS,
    name="tinyshakespeare/shallow",
    title="8 narrow layers on characters, against 4 layers of width 128 at the same compute",
    model=_transformer(67, 256, (64, 90, 128), (4, 2, 2), (2, 3, 4)),
    baseline=_transformer(67, 256, (128,), (4,), (4,)),
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
SHAKESPEARE_DEEP = dataclasses.replace(
    SHAKESPEARE,
    name="tinyshakespeare/deep",
    title="48 layers in three steps on characters, against 48 of one width at the same compute",
    model=_transformer(67, 256, (36, 52, 72), (27, 14, 7), (2, 2, 3)),
    baseline=_transformer(67, 256, (48,), (48,), (2,)),
)
# the first pair of Table 4 with a third of its widths and a vocabulary of 4,096
PROSE = dataclasses.replace(
    PYTHON_DOCS,
    name="prose/small",
    title="12 layers on English prose, against 6 layers of width 128 with the same parameters",
    model=_transformer(4096, 512, (64, 90, 128), (6, 3, 3), (2, 3, 4)),
    baseline=_transformer(4096, 512, (128,), (6,), (4,)),
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

RECIPES = by_name(PYTHON_DOCS, SHAKESPEARE, SHAKESPEARE_DEEP, PROSE)
