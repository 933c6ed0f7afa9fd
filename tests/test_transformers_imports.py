"""`import stepsnet` in front of or behind any import of transformers: its Auto classes know our models."""

import os
import subprocess
import sys

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

import stepsnet

ORDERS = """
import os, sys
import torch, torchvision, timm  # once, for they take long

def check(first):
    exec(first)
    import stepsnet
    from transformers import AutoConfig, AutoModelForSequenceClassification
    assert AutoConfig.for_model("steps_transformer").widths == [192, 272, 384]
    model = AutoModelForSequenceClassification.from_pretrained({folder!r})
    assert type(model).__name__ == "StepsLlamaForSequenceClassification" and model.config.widths == {widths}

for first in {orders}:
    if not (child := os.fork()):
        status = 1
        try:
            check(first)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, first
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
    code = ORDERS.format(orders=orders, folder=str(tmp_path), widths=model.config.widths)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
