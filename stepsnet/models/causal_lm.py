"""Any causal language model of transformers, by its model type and the fields of its configuration.

``{"name": "causal_lm", "args": {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 2}}`` in a recipe; as a
StepsNet it is ``{"name": "stepify", "args": {"model": "causal_lm", "model_type": "gpt2", …, "steps": 3}}``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ..errors import UserError, nearest

__all__ = ["create"]

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def create(model_type: str | None = None, **fields: Any) -> nn.Module:
    """A model with random weights: its logits of the next tokens are (B, N, ``vocab_size``).

    Args:
        model_type: as transformers' ``config.json`` has it, such as "gpt2".
        **fields: of its configuration; by default the library's.

    Raises:
        UserError: no such type, one that is no causal language model, or a field that its configuration does not have.
    """
    if model_type not in CONFIG_MAPPING:
        hint = nearest(str(model_type), sorted(CONFIG_MAPPING))
        raise UserError(f"model causal_lm: model_type: got {model_type!r}, expected one of transformers{hint}")
    default = AutoConfig.for_model(model_type)
    known = sorted({*default.to_dict(), *default.attribute_map})
    if unknown := [name for name in fields if name not in known]:
        raise UserError(
            f"model causal_lm: {unknown[0]}: got it for {model_type!r}, expected a field of {type(default).__name__}"
            f"{nearest(unknown[0], known)}"
        )
    size = fields.get("vocab_size", getattr(default, "vocab_size", 0))
    for name in _SPECIAL_TOKENS:  # the default's are those of its own tokenizer
        token = getattr(default, name, None)
        if isinstance(token, int) and token >= size:
            fields.setdefault(name, None)
    config = AutoConfig.for_model(model_type, **fields)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"model causal_lm: model_type: got {model_type!r}, expected a causal language model")
    if getattr(config, "is_decoder", True) is False:  # BERT and its like, which would see what they predict
        raise UserError(f"model causal_lm: is_decoder: got False for {model_type!r}, expected true")
    return AutoModelForCausalLM.from_config(config)
