"""`import stepsnet` in front of or behind any import of transformers: its Auto classes know our models."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from import_orders import check_behind_each
from transformers import AutoConfig, LlamaConfig, LlamaForSequenceClassification

import stepsnet

CHECK = """
    import stepsnet
    from transformers import AutoConfig, AutoModelForSequenceClassification
    assert AutoConfig.for_model("steps_transformer").widths == [192, 272, 384]
    model = AutoModelForSequenceClassification.from_pretrained({folder!r})
    assert type(model).__name__ == "StepsLlamaForSequenceClassification" and model.config.widths == {widths}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_order_of_imports(tmp_path):
    config = LlamaConfig(vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=4, pad_token_id=0)
    config.num_attention_heads = config.num_key_value_heads = 4
    model = stepsnet.stepify(LlamaForSequenceClassification(config), 2, tokens=8)
    model.save_pretrained(tmp_path)
    orders = [
        "import stepsnet; from transformers import GPT2Config, GPT2LMHeadModel",  # a configuration brings AutoModel
        "import stepsnet; from transformers import LlamaForSequenceClassification",
        "import transformers; transformers.AutoModelForCausalLM; import stepsnet",
    ]
    check = CHECK.format(folder=str(tmp_path), widths=model.config.widths)
    check_behind_each(orders, check, "torch, torchvision, timm")


@pytest.mark.parametrize(
    ("version", "wraps"), [("4.57.1", False), ("5.22rc1", True), ("6.0.0", True), ("unknown", True)]
)
def test_an_older_transformers_stays_as_it_is(version, wraps, monkeypatch):
    class Config:
        @classmethod
        def for_model(cls, name):
            """A class method of transformers."""
            return cls, name

        from_pretrained = for_model

    before = dict(vars(Config))
    monkeypatch.setattr("transformers.__version__", version)
    stepsnet._register_language(SimpleNamespace(AutoConfig=Config))
    assert [vars(Config)[name] is not before[name] for name in ("for_model", "from_pretrained")] == [wraps] * 2
    assert Config.for_model("x") == (Config, "x") and Config.for_model.__doc__ == "A class method of transformers."
    extras = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f"transformers>={'.'.join(map(str, stepsnet._OLDEST_TRANSFORMERS))}" in extras


def test_what_is_wrapped_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(AutoConfig.from_pretrained)) == AutoConfig.from_pretrained
