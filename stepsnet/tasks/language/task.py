"""Language modelling: next-token prediction on packed text, and perplexity by a sliding window."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...analysis.complexity import Complexity, count_language_model
from ...engine.distributed import unwrap
from ...engine.randomness import order_of_pass, sample_of_run
from ...engine.task import BatchShard, Task
from ...errors import UserError
from ...models.blocks import is_of_transformers
from ...models.build import build_model, fit_positions
from ...run_folder.folder import asset
from ...run_folder.inspection import Section
from ...settings.config import LanguageRecipe
from ...settings.from_data import key_of_model
from ..splits import is_trained_on, split_of
from .assets import save_assets
from .data import UNKNOWN, Split, TextData, load_text, load_tokenizer
from .inspection import continued

__all__ = ["LanguageModelling", "build", "open_data"]

_MOST_WORD_PERPLEXITY = 1e15  # more words than a language has; guessing characters gives less


def open_data(recipe: LanguageRecipe, data: str, run: Path | None = None) -> TextData:
    """Open the text: for a run's evaluation only what is scored, and a single file that is not its own as a whole.

    Raises:
        UserError: the data do not exist, or lack the split that is evaluated now or at the run's end.
    """
    name, split = split_of(data)
    if run is None:
        needed = ["train", split, *["test"] * recipe.score_test]
        return load_text(name, recipe.tokenizer, recipe.vocab_size, None, recipe.holdout, needed)
    needed = [split, *["train"] * (recipe.clean_samples > 0 and split == "val")]
    own, whole = load_tokenizer(asset(run, "tokenizer.json")), name == data and not is_trained_on(recipe, data)
    return load_text(name, recipe.tokenizer, recipe.vocab_size, own, recipe.holdout, needed, whole=whole)


def build(
    recipe: LanguageRecipe, data: str | None = None, run: Path | None = None, opened: TextData | None = None
) -> tuple[nn.Module, LanguageModelling]:
    """Raises UserError if the model or the data do not exist, or if they do not fit each other."""
    data = data or recipe.data
    text = opened or open_data(recipe, data, run)
    _, split = split_of(data)
    model: Any = build_model(recipe.model, pretrained=run is None)
    if not is_of_transformers(model):
        got = f"{recipe.model.name!r}, a {type(model).__name__}"
        raise UserError(f"model: got {got}, expected a causal language model of transformers, such as causal_lm")
    _check_vocabulary(model, text, f"{key_of_model(recipe)}.args.vocab_size")
    fit_positions(model, recipe.seq_len)
    if run is None and (weights := recipe.model.args.get("weights")):
        _check_tokenizer(Path(str(weights)), text)
    return model, LanguageModelling(recipe, text, split, for_training=run is None)


def macs(recipe: LanguageRecipe) -> int:
    """Multiply-accumulates per token of a forward pass, with attention over sequences of the recipe's length."""
    with torch.device("meta"):
        model = build_model(recipe.model, pretrained=False)
    return count_language_model(model, recipe.seq_len).macs


def _check_vocabulary(model: Any, text: TextData, key: str) -> None:
    got, expected = model.config.vocab_size, text.tokenizer.get_vocab_size()
    if got < expected:
        raise UserError(f"{key}: got {got}, expected at least the tokenizer's {expected}")


def _check_tokenizer(run: Path, text: TextData) -> None:
    """Raises UserError if the run has a tokenizer that is not the data's: its ids would mean other tokens."""
    own = asset(run, "tokenizer.json")
    if own.exists() and load_tokenizer(own).get_vocab() != text.tokenizer.get_vocab():
        raise UserError(
            f"data: got text whose tokenizer is not that of {run}, expected the data that it was trained on"
        )


class LanguageModelling(Task):
    """The language task, on sequences of ``seq_len`` tokens.

    Each pass visits every part of the text once, in an order that depends on (seed, pass).
    """

    monitor = "loss"
    unit = "tokens"

    def __init__(self, recipe: LanguageRecipe, text: TextData, evaluated: str, for_training: bool = True):
        """
        Args:
            evaluated: the split to evaluate.
            for_training: False if the text is only evaluated; it may then have less to train on than a batch or the
                clean samples. Nobody asks for remarks in that case, so the notices tell of unknown tokens.

        Raises:
            UserError: the training split is shorter than a batch or the clean samples, the evaluated split has fewer
                than two tokens, or the stride is longer than a window.
        """
        batch_size, seq_len = recipe.batch_size, recipe.seq_len
        if recipe.eval_stride is not None and recipe.eval_stride > seq_len:
            raise UserError(f"eval_stride: got {recipe.eval_stride}, expected at most seq_len, {seq_len}")
        self.recipe, self.text, self.batch_size, self.seq_len = recipe, text, batch_size, seq_len
        self.stride, self.evaluated, self.units_per_sample = recipe.eval_stride or seq_len, evaluated, seq_len
        clean_samples = recipe.clean_samples if for_training or evaluated == "val" else 0
        tokens = len(text.splits["train"].tokens) if "train" in text.splits else 0
        self.sequences = max((tokens - seq_len) // seq_len, 0)  # per pass, which begins at an offset below seq_len
        self.clean_tokens = max(min(clean_samples * seq_len, tokens - 1), 0)  # that are predicted
        if for_training and self.sequences < batch_size:
            raise UserError(
                f"data: got {tokens} training tokens, expected at least (batch_size + 1) × seq_len, "
                f"{batch_size + 1}×{seq_len}"
            )
        if for_training and self.clean_tokens < clean_samples * seq_len:
            raise UserError(
                f"clean_samples: got {clean_samples}, expected at most the {(tokens - 1) // seq_len} training sequences"
            )
        if len(text.splits[evaluated].tokens) < 2:
            raise UserError(f"data: the split {evaluated} has fewer than two tokens, expected at least one to predict")
        self.steps_per_epoch = recipe.epoch_updates or self.sequences // batch_size
        self.new_notices = [] if for_training else self.remarks()

    def start_of(self, number: int) -> int:
        """The position in the text at which the ``number``-th training sequence of the run begins."""
        number_of_pass, index = sample_of_run(self.recipe.seed, number, self.sequences)
        # so that each pass cuts the text at other places
        offset = order_of_pass(self.recipe.seed + 1, number_of_pass, self.seq_len)[0]
        return int(offset) + index * self.seq_len

    def batches(self, epoch: int, start: int, shard: BatchShard, device: torch.device) -> Generator[Tensor]:
        """Token ids (sequences, seq_len + 1): all but the last are the inputs, all but the first the targets."""
        tokens = self.text.splits["train"].tokens
        for update in range(start, self.steps_per_epoch):
            for positions in shard.micro_batches(epoch * self.steps_per_epoch + update, self.batch_size):
                starts = [self.start_of(position) for position in positions]
                batch = np.stack([tokens[s : s + self.seq_len + 1] for s in starts]).astype(np.int64)
                yield torch.from_numpy(batch).to(device, non_blocking=True)

    def example_batch(self, device: torch.device) -> Tensor:
        """The first sequences of the evaluated split, at most 16."""
        tokens, size = self.text.splits[self.evaluated].tokens, self.seq_len + 1
        count = max(min(len(tokens) // size, 16), 1)
        size = min(size, len(tokens))
        rows = np.asarray(tokens[: count * size]).reshape(count, size).astype(np.int64)
        return torch.from_numpy(rows).to(device)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(input_ids=batch[:, :-1], use_cache=False)  # logits (B, N, vocab_size)
        loss = nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        # balances the experts of a mixture of experts that has output_router_logits
        router_loss = getattr(output, "aux_loss", None) if model.training else None
        if router_loss is None:
            return loss, {}
        config: Any = unwrap(model).config
        return loss + config.router_aux_loss_coef * router_loss, {"router_loss": router_loss.detach()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: BatchShard, device: torch.device) -> dict[str, float]:
        """Mean negative log-likelihood and perplexities of every token but the first.

        Each window of ``seq_len`` scores its last ``stride`` tokens, and the first window all of its tokens, so that
        after the first window at least ``seq_len - stride`` tokens precede each token. The perplexity per word divides
        the log-likelihood of the text by its number of words, so that tokenizers can be compared. It is left out if it
        exceeds any vocabulary of words, as for text without spaces between words.
        """
        nll, scored = self._likelihood(self.text.splits[self.evaluated], model, shard, device)
        split = self.text.splits[self.evaluated]
        loss, of_word = nll / scored, nll / max(split.words, 1)
        scores = {
            "loss": loss,
            "perplexity": _exp(loss),
            **({"word_perplexity": _exp(of_word)} if _exp(of_word) <= _MOST_WORD_PERPLEXITY else {}),
            "bits_per_character": nll / math.log(2) / split.characters,
        }
        if self.clean_tokens:
            train = self.text.splits["train"]
            part = replace(train, tokens=train.tokens[: self.clean_tokens + 1])
            nll, scored = self._likelihood(part, model, shard, device)
            scores["train_clean_loss"] = nll / scored
        return scores

    def _likelihood(
        self, split: Split, model: nn.Module, shard: BatchShard, device: torch.device
    ) -> tuple[float, float]:
        """Negative log-likelihood of a split's tokens, and how many of them were scored."""
        windows = list(self._windows(len(split.tokens)))
        total = torch.zeros(2, dtype=torch.float64)  # on the CPU, since some accelerators have no float64
        for batch in shard.evaluation_batches(len(windows), self.recipe.eval_batch_size):
            score = self._score(model, split, [windows[index] for index in batch.indices], device)
            if not batch.is_padding:
                total += score
        nll, scored = torch.stack(shard.gather(total)).sum(0).tolist()
        return nll, scored

    def _windows(self, count: int) -> Iterator[tuple[int, int, int]]:
        """(begin, first scored token, end) of each window; each token but the first is scored once."""
        scored = 1
        while scored < count:
            end = min(scored + (self.seq_len if scored == 1 else self.stride), count)
            yield max(end - self.seq_len - 1, 0), scored, end
            scored = end

    def _score(
        self, model: nn.Module, split: Split, windows: list[tuple[int, int, int]], device: torch.device
    ) -> Tensor:
        """The negative log-likelihood and the number of the scored tokens, as (2)."""
        size = min(self.seq_len + 1, len(split.tokens))
        batch = torch.zeros(len(windows), size, dtype=torch.int64)
        counted = torch.zeros(len(windows), size - 1)
        for row, (begin, first, end) in enumerate(windows):
            batch[row, : end - begin] = torch.from_numpy(split.tokens[begin:end].astype(np.int64))
            counted[row, first - begin - 1 : end - begin - 1] = 1.0
        batch, counted = batch.to(device), counted.to(device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # windows are padded at their end
        nll = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        scored = nll * counted.flatten(), counted
        return torch.stack([values.cpu().sum(dtype=torch.float64) for values in scored])

    def remarks(self) -> list[str]:
        return [*self.text.notices, *self._unknown()]

    def notices(self) -> list[str]:
        notices, self.new_notices = self.new_notices, []
        return notices

    def _unknown(self) -> list[str]:
        """A line on tokens of the evaluated text that the tokenizer does not know, which all count as one; or none."""
        unknown, tokens = self.text.tokenizer.token_to_id(UNKNOWN), self.text.splits[self.evaluated].tokens
        count = 0 if unknown is None else int(np.count_nonzero(tokens == unknown))
        if not count:
            return []
        return [
            f"{count:,} of {len(tokens):,} tokens of {self.evaluated} are not in the vocabulary and all become "
            f"{UNKNOWN}: the loss cannot be compared with that of other tokenizers"
        ]

    def complexity(self, model: nn.Module) -> Complexity:
        return count_language_model(model, self.seq_len)

    def inspect(self, model: nn.Module, device: torch.device) -> list[Section]:
        """How the model continues the evaluated text from two places."""
        tokens = self.text.splits[self.evaluated].tokens
        return continued(model, self.text.tokenizer, tokens, self.seq_len, device)

    def check_assets(self, folder: Path) -> None:
        _check_tokenizer(folder, self.text)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Write the tokenizer and the config, with which transformers' from_pretrained loads the run's folder."""
        self.check_assets(folder)
        save_assets(model, self.text.tokenizer, folder)

    def sizes(self) -> dict[str, int]:
        """The sizes of the splits that are open, in tokens."""
        found = {name: len(split.tokens) for name, split in self.text.splits.items()}
        splits = {"train": "train", "evaluated": self.evaluated}
        return {name: found[split] for name, split in splits.items() if split in found}

    def facts(self) -> dict[str, Any]:
        sizes = {name: vars(split) | {"tokens": len(split.tokens)} for name, split in self.text.splits.items()}
        vocabulary = self.text.tokenizer.get_vocab_size()
        return {"split": self.evaluated, "text": sizes, "vocab_size": vocabulary, "eval_stride": self.stride}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
