"""Language modelling: next-token prediction on packed text, and perplexity by a sliding window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.complexity import count_language_model
from ..engine.randomness import data_order
from ..engine.task import Share
from ..errors import UserError
from ..files import write_atomically
from ..models.build import build_model
from ..recipes.recipe import LanguageRecipe
from .setup import Setup
from .text_data import END_OF_TEXT, Split, TextData, load_text, load_tokenizer

__all__ = ["LanguageModelling", "set_up"]

_EVALUATED_AT_ONCE = 32  # windows


def set_up(recipe: LanguageRecipe, data: str | None = None, run: Path | None = None) -> Setup:
    """Raises UserError for a model or data that are not there, or that do not fit each other."""
    data = data or recipe.data
    data, _, split = data.partition("@")  # DATA@test scores the test split
    own = load_tokenizer(run / "tokenizer.json") if run else None
    text = load_text(data, recipe.tokenizer, recipe.vocab_size, own, recipe.holdout)
    model: Any = build_model(recipe.model)
    _check_vocabulary(model, text)
    if split and split not in text.splits:
        raise UserError(f"data: {data} has no split {split!r}, expected one of {', '.join(text.splits)}")
    task = LanguageModelling(
        text,
        recipe.batch_size,
        recipe.seq_len,
        seed=recipe.seed,
        epoch_updates=recipe.epoch_updates,
        stride=recipe.eval_stride,
        evaluated=split or "val",
        clean_samples=0 if split else recipe.clean_samples,
    )

    def keep(folder: Path) -> None:
        """With these beside model.safetensors, transformers' from_pretrained takes the run's folder.

        Also where nobody has imported stepsnet, such as in lm_eval, if ``trust_remote_code`` is on.
        """
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, eos_token=END_OF_TEXT)
        tokenizer.save_pretrained(folder)
        model.config.architectures = [type(model).__name__]
        model.config.auto_map = {
            "AutoConfig": f"modeling_stepsnet.{type(model.config).__name__}",
            "AutoModelForCausalLM": f"modeling_stepsnet.{type(model).__name__}",
        }
        model.config.save_pretrained(folder)
        names = f"{type(model.config).__name__}, {type(model).__name__}"
        home = type(model).__module__
        write_atomically(folder / "modeling_stepsnet.py", f"from {home} import {names}  # noqa: F401\n")

    return Setup(model, task, count_language_model, task.sample, keep=keep)


def _check_vocabulary(model: Any, text: TextData) -> None:
    got, expected = model.config.vocab_size, text.tokenizer.get_vocab_size()
    if got < expected:
        raise UserError(f"model.args.vocab_size: got {got}, expected at least the tokenizer's {expected}")


class LanguageModelling:
    """The task: sequences of ``seq_len`` tokens, every part of the text once a pass, in an order of (seed, pass)."""

    monitor, lower_is_better = "loss", True
    unit = "tokens"

    def __init__(
        self,
        text: TextData,
        batch_size: int,
        seq_len: int,
        *,
        seed: int = 0,
        epoch_updates: int | None = None,
        stride: int | None = None,
        evaluated: str = "val",
        clean_samples: int = 0,
    ):
        """
        Args:
            batch_size: sequences an update, over all ranks and accumulated parts.
            epoch_updates: updates between evaluations, of however many passes; None is one pass.
            stride: tokens scored in each window of ``seq_len``, the last ones; None is all of them.
            clean_samples: sequences at the training text's beginning that evaluation scores too, without dropout.

        Raises:
            UserError: a split that is shorter than a batch, or a stride that is longer than a window.
        """
        if stride is not None and stride > seq_len:
            raise UserError(f"eval_stride: got {stride}, expected at most seq_len, {seq_len}")
        self.text, self.batch_size, self.seq_len, self.seed = text, batch_size, seq_len, seed
        self.stride, self.evaluated, self.units_per_sample = stride or seq_len, evaluated, seq_len
        tokens = len(text.splits["train"].tokens)
        self.clean_tokens = clean_samples * seq_len
        self.sequences = (tokens - seq_len) // seq_len  # a pass: its windows begin at an offset below seq_len
        if self.sequences < batch_size:
            raise UserError(
                f"data: got {tokens} training tokens, expected more than batch_size × seq_len, {batch_size}×{seq_len}"
            )
        if len(text.splits[evaluated].tokens) < 2:
            raise UserError(f"data: the split {evaluated} has less than two tokens, expected some to predict")
        self.steps_per_epoch = epoch_updates or self.sequences // batch_size

    def start_of(self, number: int) -> int:
        """Where the ``number``-th training sequence of the run begins in the text."""
        turn, position = divmod(number, self.sequences)
        order, offset = _order_of_pass(self.seed, turn, self.sequences, self.seq_len)
        return offset + int(order[position]) * self.seq_len

    def batches(self, epoch: int, start: int, share: Share, device: torch.device) -> Iterator[Tensor]:
        """(sequences, seq_len + 1) each: the inputs and, one further, what is to be predicted."""
        tokens = self.text.splits["train"].tokens
        for update in range(start, self.steps_per_epoch):
            for positions in share.micro_batches(epoch * self.steps_per_epoch + update, self.batch_size):
                starts = [self.start_of(position) for position in positions]
                batch = np.stack([tokens[s : s + self.seq_len + 1] for s in starts]).astype(np.int64)
                yield torch.from_numpy(batch).to(device, non_blocking=True)

    def sample(self, device: torch.device) -> Tensor:
        """The first sequences of the evaluated split, as many as it has, up to 16."""
        tokens, size = self.text.splits[self.evaluated].tokens, self.seq_len + 1
        count = max(min(len(tokens) // size, 16), 1)
        size = min(size, len(tokens))
        rows = np.asarray(tokens[: count * size]).reshape(count, size).astype(np.int64)
        return torch.from_numpy(rows).to(device)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # (B, N, vocab_size)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        """Mean negative log-likelihood and perplexities of every token but the first.

        Each window of ``seq_len`` scores its last ``stride`` tokens, the first window all of its own; so a
        token is seen with at least ``seq_len - stride`` others before it. Per word, the likelihood of the
        whole text is shared out over its words, so that tokenizers compare.
        """
        nll, scored = self._likelihood(self.text.splits[self.evaluated], model, share, device)
        split = self.text.splits[self.evaluated]
        loss, of_word = nll / scored, nll / max(split.words, 1)
        scores = {
            "loss": loss,
            "perplexity": _exp(loss),
            "word_perplexity": _exp(of_word),
            "bits_per_character": nll / math.log(2) / split.characters,
        }
        if self.clean_tokens:
            train = self.text.splits["train"]
            part = replace(train, tokens=train.tokens[: self.clean_tokens + 1])
            nll, scored = self._likelihood(part, model, share, device)
            scores["train_clean_loss"] = nll / scored
        return scores

    def _likelihood(self, split: Split, model: nn.Module, share: Share, device: torch.device) -> tuple[float, float]:
        """Negative log-likelihood of a split's tokens, and how many of them were scored."""
        windows = list(self._windows(len(split.tokens)))
        per_round = _EVALUATED_AT_ONCE * share.world_size
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for first in range(0, len(windows), per_round):  # equally many forward passes on each rank, as FSDP asks
            mine = windows[first + share.rank * _EVALUATED_AT_ONCE :][:_EVALUATED_AT_ONCE] or [(0, 0, 0)]
            total += self._score(model, split, mine, device)
        if share.world_size > 1:
            torch.distributed.all_reduce(total)
        nll, scored = total.tolist()
        return nll, scored

    def _windows(self, count: int) -> Iterator[tuple[int, int, int]]:
        """(begin, first scored, end) of each window's predicted tokens; each token but the first is scored once."""
        scored = 1
        while scored < count:
            end = min(scored + (self.seq_len if scored == 1 else self.stride), count)
            yield max(end - self.seq_len - 1, 0), scored, end
            scored = end

    def _score(self, model: nn.Module, split: Split, windows: list[tuple[int, int, int]], device) -> Tensor:
        """Negative log-likelihood and number of the scored tokens."""
        size = min(self.seq_len + 1, len(split.tokens))
        batch = torch.zeros(len(windows), size, dtype=torch.int64)
        counted = torch.zeros(len(windows), size - 1)
        for row, (begin, first, end) in enumerate(windows):
            batch[row, : end - begin] = torch.from_numpy(split.tokens[begin:end].astype(np.int64))
            counted[row, max(first - begin - 1, 0) : max(end - begin - 1, 0)] = 1.0
        batch, counted = batch.to(device), counted.to(device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # a window's end is padded, after what counts
        nll = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        return torch.stack(((nll * counted.flatten()).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)))

    def facts(self) -> dict[str, Any]:
        sizes = {name: vars(split) | {"tokens": len(split.tokens)} for name, split in self.text.splits.items()}
        vocabulary = self.text.tokenizer.get_vocab_size()
        return {"split": self.evaluated, "text": sizes, "vocab_size": vocabulary, "eval_stride": self.stride}

    def notices(self) -> list[str]:
        return []


@lru_cache(maxsize=2)
def _order_of_pass(seed: int, turn: int, sequences: int, seq_len: int) -> tuple[np.ndarray, int]:
    offset = int(data_order(seed + 1, turn, seq_len)[0])  # so that sequences are cut elsewhere in each pass
    return data_order(seed, turn, sequences), offset


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
