"""Any causal language model of transformers, from its model type and configuration fields.

In a recipe it is ``{"name": "causal_lm", "args": {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 2}}``,
and as a StepsNet ``{"name": "stepify", "args": {"model": "causal_lm", "model_type": "gpt2", …, "steps": 3}}``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ..errors import UserError, nearest

__all__ = ["create"]

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def create(model_type: str | None = None, **fields: Any) -> nn.Module:
    """Return a model with random weights, whose logits of the next tokens are (B, N, ``vocab_size``).

    Args:
        model_type: the ``model_type`` in transformers' ``config.json``, such as "gpt2".
        **fields: fields of the configuration; the others have the library's defaults.

    Raises:
        UserError: an unknown type, one that is not a causal language model or sees the tokens that it predicts, or a
            field that its configuration does not have.
    """
    if model_type not in CONFIG_MAPPING:
        hint = nearest(str(model_type), sorted(CONFIG_MAPPING))
        raise UserError(f"model causal_lm: model_type: got {model_type!r}, expected a model type of transformers{hint}")
    default = AutoConfig.for_model(model_type)
    known = sorted({*default.to_dict(), *default.attribute_map})
    if unknown := [name for name in fields if name not in known]:
        raise UserError(
            f"model causal_lm: got an unknown field {unknown[0]!r} for {model_type!r}, expected a field of "
            f"{type(default).__name__}{nearest(unknown[0], known)}"
        )
    size = fields.get("vocab_size", getattr(default, "vocab_size", 0))
    for name in _SPECIAL_TOKENS:  # the defaults are those of the model's own tokenizer
        token = getattr(default, name, None)
        if isinstance(token, int) and token >= size:
            fields.setdefault(name, None)
    if getattr(default, "pad_token_id", None) is not None and _does_without_padding(model_type, fields):
        fields.setdefault("pad_token_id", None)  # an ordinary token here, whose embedding would stay untrained
    config = AutoConfig.for_model(model_type, **fields)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"model causal_lm: model_type: got {model_type!r}, expected a causal language model")
    model = AutoModelForCausalLM.from_config(config)
    _check_is_causal(model, model_type)
    return model


def _does_without_padding(model_type: str | None, fields: dict[str, Any]) -> bool:
    """Whether a model can be made and run without a padding token; RoBERTa, for one, needs it to count positions."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, **{**fields, "pad_token_id": None})
            AutoModelForCausalLM.from_config(config)(input_ids=tokens, use_cache=False)
    except RuntimeError:  # from code that looks at values, which the meta device lacks
        return True
    except Exception:
        return False
    return True


def _check_is_causal(model: Any, model_type: str | None) -> None:
    """Raise UserError if the prediction at a position changes with the tokens after it, as in BERT and XLNet.

    The library has such models among its causal ones, and no configuration field tells them from the others. On the
    meta device, nothing is checked.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    tokens = torch.tensor([[3, 1, 4, 1, 5], [3, 1, 4, 1, 2]]) % model.config.vocab_size
    was_training = model.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            of_five, of_two = model.eval()(input_ids=tokens, use_cache=False).logits
    except Exception:  # a model that needs more tokens, or other inputs too: training it will tell
        return
    finally:
        model.train(was_training)
    if not torch.allclose(of_five[:-1], of_two[:-1], rtol=1e-3, atol=1e-5):
        hint = ": is_decoder=true makes it causal" if getattr(model.config, "is_decoder", None) is False else ""
        raise UserError(
            f"model causal_lm: model_type: got {model_type!r}, which sees the tokens that it predicts, expected a "
            f"model that does not{hint}"
        )
