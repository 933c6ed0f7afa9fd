"""WikiText-103: the rows of Table 4, and the settings that small language recipes derive from.

`stepsnet train wikitext103/steps_transformer_30m`. Not yet trained by us at this scale. The paper does not say whether
its perplexity is of validation or of test, nor with what stride; both are scored here, per token and per word. It names
no tokenizer either, so that its perplexities may be of other tokens than ours.
"""

from __future__ import annotations

from typing import Any

from ..settings.config import LanguageRecipe, ModelSpec
from .table_rows import by_name, recipe_of_row

__all__ = ["RECIPES", "WIKITEXT103"]

# The settings of Appendix A: a vocabulary of 50,000, sequences of 128 tokens, 0.128M tokens per update (1,024 sequences
# are 0.131M). The embedding starts as LLaMA's, the baseline's own; docs/language.md has what a larger start changes.
# The paper names no tokenizer, optimizer, rate or length for this task. Ours are a BPE of the raw text, LLaMA's
# optimizer (AdamW, betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1), a rate of 1e-3 with a pass of warmup,
# down by cosine to a hundredth, 20 passes, no dropout, and windows that do not overlap.
WIKITEXT103 = LanguageRecipe(
    name="wikitext103",
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
    score_test=True,
)


def _pair(baseline: str, steps: str) -> list[LanguageRecipe]:
    """The rows of a baseline and its StepsNet, by their numbers of parameters."""
    args: dict[str, Any] = {"max_position_embeddings": 1024}
    row, steps_row = f"Transformer {baseline}", f"Steps-Transformer {steps}"
    return [
        recipe_of_row(WIKITEXT103, f"wikitext103/transformer_{baseline.lower()}", "4", row, **args),
        recipe_of_row(
            WIKITEXT103, f"wikitext103/steps_transformer_{steps.lower()}", "4", steps_row, baseline=row, **args
        ),
    ]


RECIPES = by_name(*_pair("30M", "30M"), *_pair("44M", "45M"), *_pair("63M", "64M"))
