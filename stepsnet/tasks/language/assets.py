"""What transformers needs to load a language model besides its weights: config, tokenizer and where its classes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ...models.build import context_of
from .data import END_OF_TEXT

__all__ = ["save_assets"]


def save_assets(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files besides the weights with which ``from_pretrained`` loads the folder.

    ``modeling_stepsnet.py`` is for programs that do not import stepsnet, such as lm_eval: transformers finds it by
    ``auto_map`` and asks whether to run it (``trust_remote_code``). It only imports the installed stepsnet.
    AutoTokenizer asks too, since it reads the model's config first, though the tokenizer has no code of its own. Once
    stepsnet has been imported, its classes are registered and transformers does not ask.
    """
    context, end = context_of(model), tokenizer.token_to_id(END_OF_TEXT)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        **({} if context is None else {"model_max_length": context}),
        model_input_names=["input_ids", "attention_mask"],  # the model takes no token types
    )
    fast.save_pretrained(folder)
    for config in (model.config, model.generation_config):  # LLaMA's defaults are tokens 1 and 2
        config.bos_token_id, config.eos_token_id = None, end
        if not any(getattr(part, "padding_idx", None) is not None for part in model.modules()):
            config.pad_token_id = None  # the default is the id of an ordinary token here
    model.config.architectures = [type(model).__name__]
    if type(model).__module__.startswith("stepsnet."):  # not transformers' own class
        names = {"AutoConfig": type(model.config).__name__, "AutoModelForCausalLM": type(model).__name__}
        model.config.let_others_find(**names)
    model.config.save_pretrained(folder)
