"""Any causal language model of transformers in a recipe: trained, beside its StepsNet, and read back by the library."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)

from stepsnet.analysis.complexity import count_language_model
from stepsnet.bench import TOKENS, Candidate, bench
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model, context_of, fit_positions
from stepsnet.recipes.any_model import stepify_pair, with_vocabulary
from stepsnet.settings.config import ModelSpec
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.deployment import of_tokens
from stepsnet.tasks.language.assets import save_assets
from stepsnet.tasks.language.data import load_text
from stepsnet.tasks.language.inspection import continued
from stepsnet.tasks.language.task import LanguageModelling

FIELDS = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 300}
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
XLNET = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}


def test_it_is_the_librarys_own():
    torch.manual_seed(0)
    ours = build_model(ModelSpec("causal_lm", {"model_type": "gpt2", **FIELDS}))
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**FIELDS, bos_token_id=None, eos_token_id=None))
    assert type(ours) is GPT2LMHeadModel
    for (name, mine), (other, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(mine, expected)


@pytest.mark.parametrize(
    "args, expected",
    [
        ({}, "model_type: got None, expected a model type of transformers"),
        ({"model_type": "gtp2"}, r"model_type: got 'gtp2', expected a model type of transformers \(did you mean gpt2"),
        (
            {"model_type": "gpt2", "n_embed": 3},
            r"got an unknown field 'n_embed' for 'gpt2', expected a field of GPT2Config .*n_embd",
        ),
        ({"model_type": "t5"}, "model_type: got 't5', expected a causal language model"),
        ({"model_type": "bert", **BERT}, "got 'bert', which sees the tokens that .*: is_decoder=true makes it causal"),
        (
            {"model_type": "xlnet", **XLNET},
            "got 'xlnet', which sees the tokens that it predicts, expected a model that",
        ),
        ({"model_type": "gpt2", **FIELDS, "n_head": 5}, "model causal_lm: .*64"),
    ],
)
def test_mistakes(args, expected):
    with pytest.raises(UserError, match=expected) as raised:
        build_model(ModelSpec("causal_lm", args))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "args", [{"model_type": "gpt_neox", **BERT}, {"model_type": "bert", **BERT, "is_decoder": True}]
)
def test_what_is_causal_is_taken_whatever_its_configuration_says(args):
    model = build_model(ModelSpec("causal_lm", {**args, "vocab_size": 300}))
    assert model.training and model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 300)


@pytest.mark.parametrize("model_type, padding", [("olmo2", None), ("gemma2", None), ("opt", None), ("roberta", 1)])
def test_no_token_of_the_data_is_taken_for_padding(model_type, padding, tmp_path):
    """The library's default is one of its own tokenizer's; RoBERTa counts positions by it."""
    fields = {**BERT, "ffn_dim": 32, "num_key_value_heads": 2, "head_dim": 16, "word_embed_proj_dim": 32}
    known = AutoConfig.for_model(model_type).to_dict()
    args = {name: value for name, value in fields.items() if name in known}
    args |= {"is_decoder": True} if model_type == "roberta" else {}
    data = load_text("python-docs", "bpe", 300)
    model = build_model(ModelSpec("causal_lm", {"model_type": model_type, "vocab_size": 300, **args}))
    rows = model.get_input_embeddings().weight.norm(dim=1)
    assert (rows == 0).nonzero().flatten().tolist() == ([] if padding is None else [padding])
    save_assets(model, data.tokenizer, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).pad_token_id == model.generation_config.pad_token_id == padding


def test_a_model_without_an_end_of_its_positions(tmp_path):
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    data = load_text("python-docs", "characters", None)
    size = data.tokenizer.get_vocab_size()
    model = build_model(ModelSpec("causal_lm", {"model_type": "mamba", "vocab_size": size, **fields}))
    assert context_of(model) is None and context_of(GPT2LMHeadModel(GPT2Config(**FIELDS))) == 32
    save_assets(model, data.tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length > 1e9
    assert continued(model.eval(), data.tokenizer, data.splits["val"].tokens, 64, torch.device("cpu"))
    assert of_tokens(model).preprocessing == {} and of_tokens(model).shape[0] > 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The folder of a configuration, as the library writes it, and a text."""
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2Config(**{**FIELDS, "vocab_size": 50257}).save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("".join(f"{number} steps, {number**2} blocks.\n" for number in range(1200)))
    return folder, text


def test_a_pair_from_a_folder_is_trained_and_read_back(gpt2, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    folder, text = gpt2
    small = ["vocab_size=300", "epochs=2", "epoch_updates=6", "batch_size=4", "stream_epochs=1"]
    line = ["compare", "--model", f"transformers:{folder}", "--data", f"text:{text}", "--run", str(tmp_path / "pair")]
    assert main([*line, "--jobs", "1", *small]) == 0
    capsys.readouterr()
    ids = torch.randint(0, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    for run, name in (("stepsnet", "StepsGPT2LMHeadModel"), ("baseline", "GPT2LMHeadModel")):
        found = next((tmp_path / "pair").glob(f"*{run}*/metrics.jsonl")).parent
        config = json.loads((found / "config.json").read_text())
        assert config["architectures"] == [name] and config["n_layer" if run == "baseline" else "widths"]
        model = AutoModelForCausalLM.from_pretrained(found, use_safetensors=True).eval()
        assert type(model).__name__ == name and len(AutoTokenizer.from_pretrained(found)) == 300
        with torch.no_grad():
            assert model(ids).logits.shape == (1, 12, 300)
        assert main(["eval", str(found), "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)
        assert math.isfinite(scores["perplexity"])
        assert main(["predict", str(found), "--prompt", "12 steps", "--tokens", "3"]) == 0
        assert "12 steps" in capsys.readouterr().out
    report = (tmp_path / "pair" / "report.html").read_text()
    assert "γ" in report


def test_more_tokens_than_learned_positions_are_refused(gpt2, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    folder, text = gpt2
    line = ["compare", "--model", f"transformers:{folder}", "--data", f"text:{text}", "--run", str(tmp_path / "pair")]
    assert main([*line, "vocab_size=300", "seq_len=64", "--dry-run"]) == 2
    assert "seq_len: got 64, expected at most the model's 32 positions" in capsys.readouterr().err
    assert main([*line, "tokenizer=characters", "vocab_size=null", "--dry-run"]) == 2
    assert (
        "model.args.vocab_size: got none with tokenizer=characters, expected the size of its" in capsys.readouterr().err
    )


def test_a_folder_without_a_model_type_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"configuration: cannot read .*config\.json: No such file"):
        stepify_pair(f"transformers:{tmp_path}", "text:x")
    assert main(["compare", "--model", "transformers:x", "--data", "text:x"]) == 2
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--model: .*config\.json has no model_type"):
        stepify_pair(f"transformers:{tmp_path}", "text:x")


BEFORE_5 = {
    "llama": {
        **dict(model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4),
        **dict(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="float16", vocab_size=32000),
    },
    "gpt2": {
        **dict(model_type="gpt2", n_ctx=32, n_positions=32, n_embd=64, n_layer=4, n_head=4, vocab_size=50257),
        **dict(task_specific_params={"text-generation": {"max_length": 50}}, eos_token_id=50256, resid_pdrop=0.2),
    },
}


@pytest.mark.parametrize("name", BEFORE_5)
def test_a_folder_of_an_earlier_transformers_is_a_pair(name, tmp_path):
    """The library renames some fields and passes over others, such as what a pipeline was told."""
    (tmp_path / "config.json").write_text(json.dumps(BEFORE_5[name]))
    recipe = with_vocabulary(stepify_pair(f"transformers:{tmp_path}", "text:x"))
    (tmp_path / "config.json").unlink()  # a run needs it no more
    baseline, ours = (build_model(spec) for spec in (recipe.baseline, recipe.model))
    assert ours.config.model_type == f"steps_{name}" and recipe.seq_len == (32 if name == "gpt2" else 256)
    for model in (baseline, ours):
        assert model.config.vocab_size == recipe.vocab_size and model.dtype == torch.float32
        if name == "gpt2":
            assert model.config.resid_pdrop == 0.2
        else:
            found = model.config.rope_parameters
            assert (found["rope_theta"], found["rope_type"], found["factor"]) == (5e5, "linear", 2.0)


def test_what_a_configuration_derives_is_derived_anew(tmp_path):
    """A recipe holds what the file says, so that another width or depth has heads and types of its own."""
    sizes = {**BEFORE_5["llama"], "model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "rope_scaling": None}))
    recipe = with_vocabulary(stepify_pair(f"transformers:{tmp_path}", "text:x"))
    assert not {"head_dim", "layer_types"} & recipe.baseline.args.keys()
    for change in ({"hidden_size": 32}, {"num_hidden_layers": 2}):
        model = build_model(ModelSpec(recipe.baseline.name, recipe.baseline.args | change))
        assert model(torch.zeros(1, 8, dtype=torch.long)).logits.shape[:2] == (1, 8)
        assert all(getattr(model.config, key) == value for key, value in change.items())
        head = model.config.hidden_size // 4
        assert model.model.layers[0].self_attn.q_proj.out_features == 4 * head
        assert len(model.config.layer_types) == model.config.num_hidden_layers


def test_a_value_that_a_configuration_does_not_take_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BEFORE_5["gpt2"], "n_layer": "x"}))
    with pytest.raises(UserError, match=r"--model: cannot read .*config\.json: .*n_layer") as raised:
        stepify_pair(f"transformers:{tmp_path}", "text:x")
    assert len(str(raised.value).splitlines()) == 1


def test_a_router_that_is_asked_for_balance_is_trained_for_it():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    router = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    args = {"model_type": "mixtral", "vocab_size": 50, "num_key_value_heads": 2, **sizes, **router}
    model, batch = build_model(ModelSpec("causal_lm", args)), torch.randint(0, 50, (2, 9))
    ours, others = LanguageModelling.loss(None, model.train(), batch)
    theirs = model(input_ids=batch[:, :-1], labels=batch[:, :-1], shift_labels=batch[:, 1:].contiguous())
    torch.testing.assert_close(ours, theirs.loss)
    torch.testing.assert_close(others, {"router_loss": theirs.aux_loss.detach()})
    of_text, _ = LanguageModelling.loss(None, model.eval(), batch)
    torch.testing.assert_close(of_text, ours - 0.5 * theirs.aux_loss)


OWN_MASK = {
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 64,
    },
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "openai-gpt": {"n_embd": 32, "n_layer": 1, "n_head": 2},
}


@pytest.mark.parametrize("kind", OWN_MASK)
def test_a_model_that_makes_its_own_mask_is_counted(kind):
    model = build_model(ModelSpec("causal_lm", {"model_type": kind, "vocab_size": 50, **OWN_MASK[kind]}))
    model.set_attn_implementation("eager")  # torch's counter before 2.15 leaves out a CPU's own attention
    ids = torch.zeros(1, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.eval()(ids, use_cache=False)
    found = count_language_model(model, 16).macs
    assert found == pytest.approx(counted.get_total_flops() / 2 / 16, rel=0.05)  # but for norms, which we count too


def test_rotary_positions_that_go_on_are_counted_whole():
    args = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    few, many = (
        build_model(
            ModelSpec("causal_lm", {"model_type": "llama", "vocab_size": 50, **args, "max_position_embeddings": n})
        )
        for n in (16, 64)
    )
    assert count_language_model(few, 64).macs == count_language_model(many, 64).macs


def test_what_cannot_be_counted_is_said_before_the_training(tmp_path, monkeypatch, capsys):
    def uncounted(task, model):
        raise UserError("model: cannot be counted")

    monkeypatch.setattr(Classification, "complexity", uncounted)
    monkeypatch.setattr("stepsnet.runs.train.train", None)  # which is not reached
    assert main(["train", "digits/tiny", "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "stepsnet: model: cannot be counted\n"


@pytest.mark.parametrize("positions", [64, 2 * TOKENS])
def test_any_language_model_is_measured_on_tokens(positions):
    """On no more than it has positions for."""
    spec = ModelSpec("causal_lm", {"model_type": "gpt2", **FIELDS, "n_positions": positions})
    result = bench([Candidate("gpt2", "gpt2", spec)], batch_size=1, rounds=1, memory_batches=None, device="cpu")
    (row,) = result["rows"]
    assert row["shape"] == [min(positions, TOKENS)] and row["training"]["n"] == 1


def test_a_config_says_the_length_that_its_model_is_trained_at():
    """lm-eval, vLLM and pipelines cut to it. A scaled rotary formula has the length itself."""
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for make, expected in (
        (partial(LlamaConfig), 96),
        (partial(Gemma3TextConfig), 96),
        (partial(LlamaConfig, rope_parameters=scaled), 64),
    ):
        model = SimpleNamespace(config=make(max_position_embeddings=64))
        fit_positions(model, 48)
        assert model.config.max_position_embeddings == 64
        fit_positions(model, 96)
        assert model.config.max_position_embeddings == expected


def test_positions_that_are_counted_from_the_padding_are_fewer():
    """RoBERTa's table has rows that no token of a text reads; the vocabulary of a model may be as large as a table."""
    sizes = {**BERT, "is_decoder": True, "max_position_embeddings": 66, "vocab_size": 66}
    roberta, bert = (build_model(ModelSpec("causal_lm", {"model_type": kind, **sizes})) for kind in ("roberta", "bert"))
    assert (context_of(roberta), context_of(bert)) == (64, 66)
    roberta(torch.full((1, 64), 7))
    fit_positions(roberta, 64)
    with pytest.raises(UserError, match="seq_len: got 65, expected at most the model's 64 positions"):
        fit_positions(roberta, 65)
