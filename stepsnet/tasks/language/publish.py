"""A language model in transformers' format: ``AutoModelForCausalLM.from_pretrained`` loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from ...models.trained import trained_model
from ...run_folder.folder import asset
from ...settings.config import LanguageRecipe
from ..publication import Publication
from .assets import save_assets
from .data import load_tokenizer

__all__ = ["publish"]

_USAGE = """\
{registers}from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained("SOURCE")
model = AutoModelForCausalLM.from_pretrained("SOURCE")
tokens = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
"""

_NOTE = """\
Without `import stepsnet`, transformers asks whether to run custom code, or wants `trust_remote_code=True`: it has found
`modeling_stepsnet.py` in this repository, whose one line imports the installed stepsnet. `AutoTokenizer` asks too,
because it reads the model's config first; the tokenizer has no code of its own, and is the same after any answer."""
_OTHER_TOKENIZER = """\
`AutoTokenizer` makes a different tokenizer from this repository, which gives other tokens than those that the model
was trained on: transformers assumes that all models of this type have one family's tokenizer.
`PreTrainedTokenizerFast`, as above, reads the right one."""
_SAMPLE = "Two  blanks,\n\n    an indented line: 12,345 tokens\n"  # text that tokenizers split in different ways


def publish(run: Path, recipe: LanguageRecipe, folder: Path) -> Publication:
    """Write weights, config and tokenizer. Raises UserError if the run has no weights or no tokenizer."""
    model: Any = trained_model(run, recipe)
    tokenizer = load_tokenizer(asset(run, "tokenizer.json"))
    save_assets(model, tokenizer, folder)
    with _no_bars():
        model.save_pretrained(folder)
    is_ours = (folder / "modeling_stepsnet.py").exists()  # not a model of transformers' own
    usage = _USAGE.format(registers="import stepsnet  # registers the model with transformers\n" if is_ours else "")
    is_other = AutoTokenizer.from_pretrained(folder)(_SAMPLE).input_ids != tokenizer.encode(_SAMPLE).ids
    notes = [note for note, applies in ((_NOTE, is_ours), (_OTHER_TOKENIZER, is_other)) if applies]
    return Publication("transformers", "text-generation", usage, "\n\n".join(notes))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, which end up in logs too, for work of a second."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
