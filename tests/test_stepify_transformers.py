"""A model of transformers as a StepsNet: one contract for every family, through the library's own ways."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import stepsnet
from stepsnet.analysis.interventions import masked
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, widths_of
from stepsnet.models.stepify.of_transformers import model_of_name, token_example
from stepsnet.models.stepify.roles import get_path
from stepsnet.models.transformers_families import FAMILIES, layer_of, steps_config_class

SIZES = dict(vocab_size=101, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)
GROUPED = dict(num_key_value_heads=2, intermediate_size=176)
DRY = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT2 = dict(vocab_size=101, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
WET = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
SLIDING = dict(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=4, use_sliding_window=True)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **GROUPED), AutoModelForCausalLM),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **GROUPED, tie_word_embeddings=True), AutoModelForCausalLM),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **GROUPED, **SLIDING, head_dim=24), AutoModelForCausalLM),
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, **GROUPED, sliding_window=4),
        AutoModelForCausalLM,
    ),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**SIZES, **GROUPED, pad_token_id=0, original_max_position_embeddings=64),
        AutoModelForCausalLM,
    ),
    "granite": (
        transformers.GraniteForCausalLM,
        transformers.GraniteConfig(**SIZES, **GROUPED, embedding_multiplier=2.0, residual_multiplier=0.5),
        AutoModelForCausalLM,
    ),
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**SIZES, **GROUPED), AutoModelForCausalLM),
    "gemma": (
        transformers.GemmaForCausalLM,
        transformers.GemmaConfig(**SIZES, **GROUPED, head_dim=16),
        AutoModelForCausalLM,
    ),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**SIZES, **GROUPED, head_dim=16, sliding_window=4),
        AutoModelForCausalLM,
    ),
    "olmo3": (
        transformers.Olmo3ForCausalLM,
        transformers.Olmo3Config(**SIZES, **GROUPED, sliding_window=4),
        AutoModelForCausalLM,
    ),
    "gemma3_text": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**SIZES, **GROUPED, head_dim=16, sliding_window=4),
        AutoModelForCausalLM,
    ),
    "gpt_neox": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(**SIZES, intermediate_size=256),
        AutoModelForCausalLM,
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2, **WET), AutoModelForCausalLM),
    "bert": (BertForMaskedLM, BertConfig(**SIZES, **DRY, intermediate_size=256), AutoModelForMaskedLM),
    "roberta": (
        transformers.RobertaForMaskedLM,
        transformers.RobertaConfig(**SIZES, **DRY, intermediate_size=256),
        AutoModelForMaskedLM,
    ),
    "mamba": (
        MambaForCausalLM,
        MambaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=4, state_size=4),
        AutoModelForCausalLM,
    ),
    "a classifier": (
        LlamaForSequenceClassification,
        LlamaConfig(**SIZES, **GROUPED, pad_token_id=0),
        AutoModelForSequenceClassification,
    ),
    "a classifier of two kinds of layers": (
        transformers.Qwen3ForSequenceClassification,
        Qwen3Config(**SIZES, **GROUPED, **SLIDING, head_dim=24, pad_token_id=0),
        AutoModelForSequenceClassification,
    ),
}
ENCODERS = ("bert", "roberta")
EVERY = pytest.mark.parametrize("name", MODELS)
IDS = torch.randint(3, 101, (2, 9), generator=torch.Generator().manual_seed(1))


def make(name):
    torch.manual_seed(0)
    model_class, config, _ = MODELS[name]
    return model_class(copy.deepcopy(config)).eval()


def in_steps(model, steps=3, **options):
    torch.manual_seed(0)
    return stepsnet.stepify(model, steps, tokens=16, **options).eval()


def stir(model):
    for parameter in model.parameters():  # so that the blocks do something
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


def gradients(model):
    model.zero_grad()
    model(IDS).logits.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@EVERY
def test_contract(name, tmp_path):
    model = make(name)
    model_class, _, auto = MODELS[name]
    one = in_steps(model, 1)
    assert type(one) is model_class and list(one.state_dict()) == list(model.state_dict())
    assert torch.equal(one(IDS).logits, model(IDS).logits)

    ours = in_steps(model)
    config = ours.config
    assert isinstance(ours, model_class) and config.model_type == f"steps_{model.config.model_type}"
    assert config.num_hidden_layers == sum(config.depths) == len(blocks_of(ours)) and len(config.depths) == 3
    example = token_example(model, 16)
    assert abs(example.macs(ours) / example.macs(model) - 1) < 0.05
    theirs, inside = model.state_dict(), FAMILIES[model.config.model_type].layers
    kept = {key: tensor for key, tensor in ours.state_dict().items() if f".{inside}." not in key}
    assert kept and all(torch.equal(tensor, theirs[key]) for key, tensor in kept.items())

    stir(ours)
    expected = ours(IDS).logits
    states = ours(IDS, output_hidden_states=True).hidden_states
    assert len(states) == len(blocks_of(ours)) + 1 and {state.shape for state in states} == {(2, 9, 64)}
    widths = widths_of(ours)[1:] if name == "mamba" else widths_of(ours)  # its states begin behind the first block
    for before, after, width in zip(states, states[1:-1], widths):
        assert torch.equal(before[..., width:], after[..., width:]) and not torch.equal(before, after)
    by_hand = gradients(ours)
    assert all(gradient is not None for gradient in by_hand.values())
    ours.train().gradient_checkpointing_enable()
    for key, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, by_hand[key], msg=key)
    ours.gradient_checkpointing_disable()
    ours.eval().save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is type(ours) and again.config.to_diff_dict() == config.to_diff_dict()
    assert torch.equal(again(IDS).logits, expected)
    assert isinstance(AutoModel.from_pretrained(tmp_path), transformers.PreTrainedModel)
    with pytest.raises((RuntimeError, ValueError)):  # never silently a plain model with these weights
        model_class.from_pretrained(tmp_path)
    for copied in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(copied(IDS).logits, expected)


def test_rotary_positions_that_depend_on_the_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES | {"max_position_embeddings": 8}, **GROUPED, rope_parameters=rope)
    ).eval()
    ours = in_steps(model).eval()
    assert torch.equal(in_steps(model, 1)(IDS).logits, model(IDS).logits)  # 9 positions
    assert ours.model.rotary_emb.rope_type == "dynamic" and ours(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "qwen3"])
def test_fewer_layers_end_the_stream(name, tmp_path):
    """As in transformers: of a keyword, and of layers that were cut by hand."""
    ours = stir(in_steps(make(name))).eval()
    path = FAMILIES[name].layers
    layers, number = get_path(ours.base_model, path), "n_layer" if name == "gpt2" else "num_hidden_layers"
    outputs = []
    layers[2].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    ours(IDS)
    state = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    norm = next(getattr(ours.base_model, key) for key in ("norm", "ln_f", "norm_f") if hasattr(ours.base_model, key))
    expected = ours.get_output_embeddings()(norm(state))
    ours.save_pretrained(tmp_path)
    short = AutoModelForCausalLM.from_pretrained(tmp_path, **{number: 3}).eval()
    short.save_pretrained(tmp_path / "short")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "short").eval()
    del layers[3:]
    ours.config.num_hidden_layers = 3
    if "layer_types" in vars(ours.config):
        ours.config.layer_types = (ours.config.layer_types or [])[:3] or None
    ours.save_pretrained(tmp_path / "cut")
    for model in (short, again, ours, AutoModelForCausalLM.from_pretrained(tmp_path / "cut").eval()):
        assert len(get_path(model.base_model, path)) == model.config.num_hidden_layers == len(widths_of(model)) == 3
        assert blocks_of(model, [1]) == blocks_of(model)
        with pytest.raises(ValueError, match=r"expected numbers from 1 to the model's number of steps, which is 1$"):
            blocks_of(model, [2])  # which no layer is of
        torch.testing.assert_close(model(IDS).logits, expected)
        if name != "mamba":
            cached = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
            assert torch.equal(cached, model.generate(IDS[:1], max_new_tokens=4, do_sample=False, use_cache=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"widths": [16, 32, 64]}, "widths: got .16, 32, 64., expected .32, 48, 64., as in step_sizes"),
        ({"depths": [4, 2]}, "depths: got .4, 2., expected one per width"),
        ({"num_hidden_layers": 40}, "num_hidden_layers: got 40, expected 0 to [0-9]+, the sum of depths"),
    ],
)
def test_other_sizes_of_a_configuration_that_is_there_are_one_line(changes, said, tmp_path):
    in_steps(make("llama")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path, **changes)


def test_other_depths_of_a_configuration_that_is_there_are_so_many_layers(tmp_path):
    in_steps(make("gpt2")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path, depths=[2, 2, 1]))
    assert model.config.n_layer == len(model.transformer.h) == 5


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ENCODERS])
def test_generation_with_the_cache_equals_that_without(name):
    ours = stir(in_steps(make(name), profile="bowtie"))
    how = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(IDS))
    expected = ours.generate(IDS, **how, use_cache=False)
    assert torch.equal(ours.generate(IDS, **how), expected)
    if name != "mamba":
        assert torch.equal(ours.generate(IDS, **how, cache_implementation="static"), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_is_the_librarys_at_its_width(name):
    """The same sizes in a configuration of the library's own, for which it makes the layer itself."""
    model = make(name)
    config, family = model.config, FAMILIES[name]
    heads = None if name == "mamba" else 2
    sizes = family.sizes(config, 32, heads)
    ours = layer_of(name, config, sizes, 0)
    native = family.layer_class(type(config)(**{**config.to_dict(), **sizes}), 0)
    assert {key: t.shape for key, t in ours.state_dict().items()} == {
        key: t.shape for key, t in native.state_dict().items()
    }
    numbers = (int, float, bool)
    for mine, theirs in zip(ours.modules(), native.modules(), strict=True):
        same = {key: value for key, value in vars(theirs).items() if isinstance(value, numbers)}
        assert same == {key: value for key, value in vars(mine).items() if isinstance(value, numbers)}
    branches = stepsnet.branches_of(native)
    if name in ENCODERS:
        assert branches is None  # post-norm
        return
    native.eval()
    for parameter in native.parameters():  # a layer alone has parameters that nothing has filled
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 5, 32)
    kwargs = {}
    if hasattr(model.base_model, "rotary_emb"):
        of_type = config.layer_types[:1] if name in ("olmo3", "gemma3_text") else []  # theirs differ by the type
        rotary = model.base_model.rotary_emb(x, torch.arange(5)[None], *of_type)
        kwargs = {"position_embeddings": rotary, "attention_mask": None}
    z = x + branches[0](x, **kwargs)
    z = z + branches[1](z) if len(branches) > 1 else z
    torch.testing.assert_close(z, native(x, **kwargs))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_start_as_the_library_starts_a_model_of_so_many_layers(name):
    model_class, config, _ = MODELS[name]
    torch.manual_seed(0)
    ours = stepsnet.stepify(model_class(config), plan={"widths": (32, 64), "depths": (3, 3)})
    fields = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    native = model_class(type(config)(**{**fields, "num_hidden_layers": 6}))
    inside = FAMILIES[name].layers
    for key, expected in native.base_model.get_submodule(f"{inside}.5").named_parameters():
        found = ours.base_model.get_parameter(f"{inside}.5.{key}")
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.15, abs=1e-4), key
    if name == "gpt2":
        last = ours.transformer.h[5].mlp.c_proj.weight.std().item()
        assert last == pytest.approx(0.02 / math.sqrt(2 * 6), rel=0.05)


def test_a_layer_that_its_configuration_does_not_make_is_refused():
    model_class, config, _ = MODELS["llama"]
    for change, said in (
        (
            lambda m: setattr(m.model.layers[2], "mlp", torch.nn.Sequential(torch.nn.Linear(64, 64))),
            "got Sequential, exp",
        ),
        (lambda m: setattr(m.model.layers[1].mlp, "up_proj", torch.nn.Linear(64, 9)), "got the shape"),
        (lambda m: setattr(m.model.layers[0], "more", torch.nn.Linear(64, 64)), "got Linear, expected nothing"),
        (lambda m: setattr(m.model.layers[1].self_attn, "attention_dropout", 0.3), "got 0.3, expected 0.0"),
        (lambda m: setattr(m.model.layers[2].post_attention_layernorm, "variance_epsilon", 0.1), "got 0.1, expected"),
        (lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.ReLU()), "got ReLU, expected SiLU"),
    ):
        model = model_class(config)
        change(model)
        for function in (stepsnet.stepify, stepsnet.grow):
            with pytest.raises(UserError, match=f"{function.__name__}: LlamaForCausalLM, layer [012], .*: {said}"):
                function(model, steps=2)
    model = model_class(config)
    del model.model.layers[1]
    with pytest.raises(UserError, match=r"LlamaForCausalLM has 3 layers, expected 4, as model.config says"):
        stepsnet.stepify(model, steps=2)


def test_half_precision_leaves_the_positions_theirs():
    model_class, config, _ = MODELS["llama"]
    model = model_class(config).to(torch.bfloat16)
    model.model.rotary_emb.inv_freq = model_class(config).model.rotary_emb.inv_freq  # as from_pretrained leaves them
    ours = stepsnet.stepify(model, steps=2)
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32 and ours.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(ours.model.embed_tokens.weight, model.model.embed_tokens.weight, rtol=0, atol=0)


def test_the_stream_is_measured_scaled_and_masked():
    """gamma and widths by block; a scale of the stream is one of the embeddings; masked channels stay out."""
    model = make("llama")
    ours = stir(in_steps(model))
    scaled = in_steps(model, stream_scale=4.0)
    scaled.load_state_dict(ours.state_dict())
    embedded = ours.model.embed_tokens(IDS)
    torch.testing.assert_close(scaled(IDS).logits, ours(inputs_embeds=4 * embedded).logits)
    blocks = measure_stream(ours, lambda model: model(IDS, labels=IDS).loss)
    states = ours(IDS, output_hidden_states=True).hidden_states
    for block, width, after in zip(blocks, widths_of(ours), states[1:-1]):
        sigma_0, sigma = states[0][..., :width].std(-1).mean(), after[..., :width].std(-1).mean()
        assert block.width == width and block.gamma_read == pytest.approx((sigma_0 / sigma).item(), rel=1e-4)
    slow = min(widths_of(ours))
    kept = torch.ones(64)
    kept[:slow] = 0
    with masked(ours, 1.0, "slow"):
        torch.testing.assert_close(ours(IDS).logits, ours(inputs_embeds=kept * embedded).logits)


def test_lora_and_compilation():
    ours = stir(in_steps(make("llama")))
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS).logits, ours(IDS).logits)
    tuned = get_peft_model(ours, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    gradients(tuned)
    trained = [name for name, parameter in tuned.named_parameters() if parameter.grad is not None]
    assert len(trained) == 2 * 2 * len(blocks_of(ours)) and all("lora" in name for name in trained)


def test_types_of_layers_go_on_in_their_order():
    ours = in_steps(make("qwen3"))
    assert ours.config.layer_types == [MODELS["qwen3"][1].layer_types[i % 2] for i in range(len(blocks_of(ours)))]
    windows = [layer.self_attn.sliding_window for layer in blocks_of(ours)]
    assert windows == [4 if i % 2 else None for i in range(len(windows))]
    assert [layer.self_attn.layer_idx for layer in blocks_of(ours)] == list(range(len(windows)))
    ours.set_attn_implementation("eager")
    assert {layer.self_attn.config._attn_implementation for layer in blocks_of(ours)} == {"eager"}


def test_types_without_a_period_keep_their_shares():
    half = Qwen2Config(**SIZES, **GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    types = in_steps(Qwen2ForCausalLM(half), 2).config.layer_types
    full = types.count("full_attention")
    assert types == ["full_attention"] * full + ["sliding_attention"] * (len(types) - full)
    assert abs(2 * full - len(types)) <= 1
    # the first layers of a grown model are those that were there
    assert stepsnet.grow(Qwen2ForCausalLM(half)).config.layer_types[:4] == half.layer_types


def test_one_step_with_a_scale_keeps_the_layers():
    model = make("llama")
    scaled = stepsnet.stepify(model, 1, stream_scale=2.0)
    assert scaled.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in scaled.state_dict().items())
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.mul_(2.0)
    torch.testing.assert_close(scaled(IDS).logits, model(IDS).logits)


def test_an_attention_that_needs_a_device_is_kept():
    config = LlamaConfig(**SIZES, **GROUPED)
    flex = AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")
    found = in_steps(flex)
    assert found.config._attn_implementation == flex.config._attn_implementation == "flex_attention"
    assert found.config.depths == in_steps(AutoModelForCausalLM.from_config(config)).config.depths


def test_what_is_frozen_or_recomputed_stays_so():
    model = make("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable()
    ours = in_steps(model, 2)
    assert not ours.model.embed_tokens.weight.requires_grad and ours.lm_head.weight.requires_grad
    assert ours.is_gradient_checkpointing


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(UserError, match="example: got one for LlamaForCausalLM, expected tokens="):
        stepsnet.stepify(make("llama"), 2, example=IDS)
    with pytest.raises(UserError, match="got a compiled LlamaForCausalLM, expected the model as it was before"):
        stepsnet.stepify(torch.compile(make("llama")), 2)

    class OwnConfig(LlamaConfig):
        pass

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    with pytest.raises(UserError, match="got Own, whose configuration is OwnConfig, expected that of one of"):
        stepsnet.stepify(Own(OwnConfig(**SIZES)), 2)
    with pytest.raises(UserError, match="is of the family 'opt', expected one of llama, qwen2"):
        stepsnet.stepify(
            transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, ffn_dim=8, word_embed_proj_dim=64))
        )
    with pytest.raises(UserError, match="is in steps already"):
        stepsnet.stepify(in_steps(make("llama")))
    with pytest.raises(UserError, match=r"stages: got \(4,\), expected some of 1, the stages with blocks of one kind"):
        stepsnet.stepify(make("llama"), stages=(4,))
    with pytest.raises(UserError, match="num_heads: got 5 at width 32, expected a positive multiple of 2"):
        stepsnet.stepify(make("llama"), plan={"widths": (32, 64), "depths": (1, 1), "num_heads": (5, 4)})
    for plan in (stepsnet.plan_steps(64, 4, 3), {"widths": (64,), "depths": (4,), "num_heads": (2,)}):
        with pytest.raises(UserError, match=r"num_heads: got [12] at width 64, expected 4, as .* with head_dim=16"):
            stepsnet.stepify(make("llama"), plan=plan, stream_scale=2)
    planned = stepsnet.stepify(make("qwen2"), plan=stepsnet.plan_steps(64, 4, 2, head_dim=16, round_to=32))
    assert planned.config.step_sizes[-1]["num_attention_heads"] == 4
    tied = make("llama")
    tied.lm_head = torch.nn.Linear(64, 101)
    with pytest.raises(UserError, match=r"lm_head\.bias is not as its configuration makes it"):
        stepsnet.stepify(tied)
    with pytest.raises(UserError, match="model: transformers:"):
        stepsnet.stepify(f"transformers:{tmp_path}")
    make("gpt2").config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has architectures="):
        stepsnet.stepify(f"transformers:{tmp_path}")
    make("gpt2").save_pretrained(tmp_path)
    assert stepsnet.stepify(f"transformers:{tmp_path}", 2).config.widths[-1] == 64
    with pytest.raises(UserError, match=r"n_layers: got 3, expected a field of GPT2Config \(did you mean n_layer"):
        stepsnet.stepify(f"transformers:{tmp_path}", 2, n_layers=3)
    with pytest.raises(UserError, match=r"model: transformers:.*n_layer.*expected int, got str"):
        stepsnet.stepify(f"transformers:{tmp_path}", 2, n_layer="x")


def test_fields_of_a_configuration_change_what_follows_from_them(tmp_path):
    make("llama").save_pretrained(tmp_path)
    fields = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=3)
    changed = model_of_name(str(tmp_path), fields).config
    expected = LlamaConfig(**{**SIZES, **GROUPED, **fields})
    assert changed.head_dim == expected.head_dim == 16 and changed.vocab_size == 101
    for name in (*fields, "intermediate_size", "head_dim", "max_position_embeddings"):
        assert getattr(changed, name) == getattr(expected, name), name
    make("gpt2").save_pretrained(tmp_path / "gpt2")  # by another name of the same
    assert model_of_name(str(tmp_path / "gpt2"), {"num_hidden_layers": 2}).config.n_layer == 2


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "llama of 6 heads"])
def test_a_field_changes_where_the_defaults_of_others_do_not_go_together(name, tmp_path):
    six = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    config = copy.deepcopy(MODELS[name][1]) if name in MODELS else LlamaConfig(**{**SIZES, **GROUPED, **six})
    config.architectures = [MODELS[name.partition(" ")[0]][0].__name__]
    config.save_pretrained(tmp_path)
    changed = model_of_name(str(tmp_path), {"vocab_size": 103}).config.to_dict()
    assert changed == {**config.to_dict(), "vocab_size": 103, "_name_or_path": changed["_name_or_path"]}


def test_arguments_of_transformers_are_taken_with_the_fields(tmp_path):
    make("llama").save_pretrained(tmp_path)
    given = {"num_labels": 5, "attn_implementation": "eager", "torch_dtype": "bfloat16"}
    config = model_of_name(str(tmp_path), given).config
    assert (config.num_labels, config._attn_implementation, config.dtype) == (5, "eager", torch.bfloat16)
    with pytest.raises(UserError, match=r"rope_theta: got 5.0, expected a field of LlamaConfig \(it is part of rope_p"):
        model_of_name(str(tmp_path), {"rope_theta": 5.0})
    for name in ("attn_implementation", "dtype"):
        with pytest.raises(UserError, match=r"model: transformers:.*bogus"):
            model_of_name(str(tmp_path), {name: "bogus"})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_the_library_and_accelerate_go_by_the_names_of_classes_for(name, tmp_path):
    """Trainer shifts the labels of causal models alone, and FSDP wraps the layers that a model names."""
    pytest.importorskip("accelerate")
    ours = in_steps(make(name))
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    trainer = Trainer(ours, arguments)
    loss = trainer.compute_loss(ours.eval(), {"input_ids": IDS, "labels": IDS.clone()})
    log_probabilities = ours(IDS).logits[:, :-1].log_softmax(-1)
    expected = nn.functional.nll_loss(log_probabilities.flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(loss, 0.9 * expected - 0.1 * log_probabilities.mean())
    kinds = {type(module).__name__ for module in ours.modules()}
    assert ours._no_split_modules and all(wanted in kinds for wanted in ours._no_split_modules)


@pytest.mark.parametrize(("layers", "is_sliding"), [(2, lambda i: i % 2 == 0), (6, lambda i: i % 6 < 5)])
def test_types_of_a_model_that_is_no_longer_than_their_period_repeat(layers, is_sliding):
    """Gemma 2 alternates, and every sixth layer of Gemma 3 has full attention, however few there are."""
    kind, config = {
        2: (transformers.Gemma2ForCausalLM, transformers.Gemma2Config),
        6: (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
    }[layers]
    sizes = {**SIZES, **GROUPED, "num_hidden_layers": layers, "head_dim": 16}
    types = in_steps(kind(config(**sizes))).config.layer_types
    assert len(types) > layers and [one == "sliding_attention" for one in types] == list(
        map(is_sliding, range(len(types)))
    )


def test_a_configuration_without_a_plan_is_refused():
    config = steps_config_class("llama")()
    with pytest.raises(ValueError, match=r"^widths: got None, expected the widths of a plan: stepsnet.stepify makes"):
        AutoModelForCausalLM.from_config(config)


def test_a_head_for_multiple_choice():
    torch.manual_seed(0)
    model = transformers.BertForMultipleChoice(BertConfig(**SIZES, **DRY, intermediate_size=256)).eval()
    ids = torch.randint(3, 101, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 1, 5:] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(in_steps(model, 1)(input_ids=ids, attention_mask=mask).logits, expected)
    ours = in_steps(model, 2)
    assert type(ours).__name__ == "StepsBertForMultipleChoice"
    alone = ours(input_ids=ids[:, 1:2, :5]).logits
    torch.testing.assert_close(ours(input_ids=ids, attention_mask=mask).logits[:, 1:2], alone)
    assert "BertLayer" in str(stepsnet.describe_stepify(model, 2, tokens=16))
