"""WikiText-103: the rows of Table 4, and the settings that small language recipes derive from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..config import LanguageRecipe, ModelSpec
from ..paper.rows import model_of, printed_rows

__all__ = ["EMBEDDING_SCALE", "RECIPES", "wikitext103"]

# 1 / LLaMA's initializer_range, for StepsNet and baseline alike: σ(z_0) is 1 to begin with. At 0.02 the first step's
# residuals drown the slices that wait, and a StepsNet falls behind (docs/language.md).
EMBEDDING_SCALE = 50.0


def wikitext103() -> LanguageRecipe:
    """The settings of Sec. 5: a vocabulary of 50,000, sequences of 128 tokens, 128K tokens an update.

    The paper names no optimizer, rate or length for this task. Ours are LLaMA's optimizer (AdamW, betas 0.9 and
    0.95, weight decay 0.1, gradients clipped at 1), a rate of 1e-3 and 20 passes.
    """
    return LanguageRecipe(
        name="wikitext103/transformer_30m",
        model=ModelSpec("steps_transformer"),
        data="hfds:Salesforce/wikitext:wikitext-103-raw-v1",
        tokenizer="bpe",
        vocab_size=50_000,
        seq_len=128,
        batch_size=1024,
        epochs=20,
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        warmup_epochs=1,
        min_lr=1e-5,
        clip_grad=1.0,
        amp_dtype="bfloat16",
    )


def _row(row: dict[str, Any]) -> tuple[str, Callable[[], LanguageRecipe]]:
    name = "wikitext103/" + row["row"].lower().replace("-", "_").replace(" ", "_")

    def model_of_row(found: dict[str, Any]) -> ModelSpec:
        model, arguments = model_of(found) or ("", {})
        return ModelSpec(model, {**arguments, "max_position_embeddings": 1024, "embedding_scale": EMBEDDING_SCALE})

    # rows come in pairs, the baseline first
    baseline = ROWS[ROWS.index(row) - 1] if row["row"].startswith("Steps-") else None

    def make() -> LanguageRecipe:
        return dataclasses.replace(
            wikitext103(),
            name=name,
            model=model_of_row(row),
            baseline=model_of_row(baseline) if baseline else None,
            expected={"val_perplexity": row["perplexity"]},
        )

    make.__doc__ = (
        f"Table 4, {row['row']}: perplexity {row['perplexity']}, {row['params_M']}M parameters.\n\n"
        f"`stepsnet train {name}`; not yet run by us at this scale. The paper does not say whether its perplexity\n"
        "is of validation or of test, nor with what stride; both are scored here, per token and per word."
    )
    return name, make


ROWS = printed_rows("4")
RECIPES = dict(_row(row) for row in ROWS)
