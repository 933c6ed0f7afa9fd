"""Steps-Transformer as a transformers model: LLaMA with one step, Eq. (5) with more, and what its tools ask."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    masking_utils,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import stepsnet
from stepsnet import StepsNet, StepsTransformerConfig, StepsTransformerForCausalLM
from stepsnet.analysis.complexity import count_language_model
from stepsnet.commands.table import compare_table
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.plan import heads_for
from stepsnet.settings.config import ModelSpec

ARGS = {"widths": (32, 48, 64), "depths": (2, 1, 1), "num_attention_heads": (2, 3, 4), "vocab_size": 101}


BOW_TIE = {"widths": (64, 32, 48, 64), "depths": (1, 2, 1, 1), "num_attention_heads": (4, 2, 3, 4)}
REVERSE = {"widths": (64, 48, 32), "depths": (1, 1, 2), "num_attention_heads": (4, 3, 2)}
PROFILES = pytest.mark.parametrize("profile", [{}, BOW_TIE, REVERSE], ids=["steps", "bow-tie", "reverse"])


def make(**changes):
    torch.manual_seed(0)
    config = StepsTransformerConfig(**{**ARGS, "max_position_embeddings": 64, "pad_token_id": 0, **changes})
    model = StepsTransformerForCausalLM(config).eval()
    for parameter in model.parameters():  # so that the blocks do something
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 101, (2, 9), generator=torch.Generator().manual_seed(1))


def test_one_step_is_llama(ids):
    shared = {"vocab_size": 101, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=64, intermediate_size=171, num_hidden_layers=3, tie_word_embeddings=True, **shared)
    llama = LlamaForCausalLM(config).eval()
    ours = StepsTransformerForCausalLM(StepsTransformerConfig(widths=64, depths=3, **shared)).eval()
    ours.load_state_dict(llama.state_dict())
    assert torch.equal(ours(ids).logits, llama(ids).logits)
    losses = [m(ids, labels=ids).loss for m in (ours, llama)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = dict(llama.named_parameters())
    assert all(torch.equal(p.grad, gradients[name].grad) for name, p in ours.named_parameters())
    hidden = [m(ids, output_hidden_states=True).hidden_states for m in (ours, llama)]
    assert len(hidden[0]) == len(hidden[1]) == 4 and all(torch.equal(a, b) for a, b in zip(*hidden))
    for asked, chosen in (([0, -1], {0, 3}), (2, {2}), (-2, {2}), ([1, 9], {1})):  # as transformers from 5.23 on
        states = ours(ids, output_hidden_states=asked).hidden_states
        assert [z is not None for z in states] == [index in chosen for index in range(4)]
        assert all(torch.equal(states[index], hidden[1][index]) for index in chosen)
    assert not any(ours(ids, output_hidden_states=asked).hidden_states for asked in (0, [], False))
    for one in (ours, llama):
        one.config.tie_last_hidden_states = False
    hidden = [m(ids, output_hidden_states=True).hidden_states for m in (ours, llama)]
    assert len(hidden[0]) == len(hidden[1]) == 4 and all(torch.equal(a, b) for a, b in zip(*hidden))
    caches = [DynamicCache(config=m.config) for m in (ours, llama)]
    assert all(m(ids, past_key_values=c, use_cache=False).past_key_values is c for m, c in zip((ours, llama), caches))


def test_hidden_states_have_gradients(ids):
    """That of the state behind the first layer is what the rest of the network says, as a function of that state."""
    torch.manual_seed(0)
    config = StepsTransformerConfig(vocab_size=101, widths=[16, 32], depths=[2, 2], num_attention_heads=[2, 4])
    model = StepsTransformerForCausalLM(config).double().eval()
    found = model(ids, output_hidden_states=True)
    gradients = torch.autograd.grad(found.logits.square().mean(), found.hidden_states)
    assert [gradient.shape for gradient in gradients] == [(*ids.shape, 32)] * 5
    inputs = found.hidden_states[0].detach()
    first, (y, rest) = model.model.layers[0], inputs.split(16, -1)
    rotary = model.model.rotary_embs[0](y, position_ids=torch.arange(ids.shape[1])[None])
    behind = torch.cat([first(y, position_embeddings=rotary), rest], -1)
    torch.testing.assert_close(behind, found.hidden_states[1])

    def mean_behind(state):
        handle = first.register_forward_hook(lambda *_: state[..., :16])
        handle_of_embedding = model.model.embed_tokens.register_forward_hook(
            lambda *_: torch.cat([y, state[..., 16:]], -1)
        )
        try:
            return model(ids).logits.square().mean()
        finally:
            handle.remove()
            handle_of_embedding.remove()

    behind = behind.detach().requires_grad_()
    torch.testing.assert_close(gradients[1], *torch.autograd.grad(mean_behind(behind), behind))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_to_both_sides_is_llamas(attention, ids):
    """Asked for in the configuration or in the call; beside a padded text a text is what it is alone."""
    ours = make(widths=64, depths=3, num_attention_heads=4, attn_implementation=attention)
    llama = LlamaForCausalLM(LlamaConfig(**{**ours.config.to_dict(), "num_attention_heads": 4,
                                            "num_key_value_heads": 4, "intermediate_size": 171})).eval()  # fmt: skip
    llama.load_state_dict(ours.state_dict())
    llama.set_attn_implementation(attention)
    texts = ids.clone()
    texts[0, 5:] = 0
    causal = ours(ids).logits
    for asked in ({"is_causal": False}, {}):
        for one in (ours, llama):
            one.config.is_causal = bool(asked)
        expected = llama(ids, **asked).logits
        torch.testing.assert_close(ours(ids, **asked).logits, expected)
        assert not torch.allclose(expected, causal)
        padded = ours(texts, attention_mask=(texts != 0).long(), **asked).logits
        torch.testing.assert_close(padded[1], expected[1])


def test_the_embedding_is_scaled(model, ids):
    """Twice the scale is twice the embedding, whose head is not scaled; given embeddings are taken as they are."""
    scaled = make(embedding_scale=2)
    embeds = 2 * model.model.embed_tokens(ids)
    expected = model(inputs_embeds=embeds).logits
    torch.testing.assert_close(scaled(ids).logits, expected)
    torch.testing.assert_close(scaled(inputs_embeds=embeds).logits, expected)
    assert not torch.allclose(model(ids).logits, expected)


def test_the_embedding_may_start_at_a_deviation_of_its_own(tmp_path):
    """The head keeps its start where it is not tied, padding stays 0, and saved weights are not drawn anew."""
    torch.manual_seed(0)
    options = {**ARGS, "vocab_size": 500, "tie_word_embeddings": False, "pad_token_id": 3}
    model = StepsTransformerForCausalLM(StepsTransformerConfig(**options, embedding_initializer_range=1.0))
    embedding = model.model.embed_tokens.weight
    others = torch.cat((embedding[:3], embedding[4:]))
    assert others.std().item() == pytest.approx(1.0, rel=0.05) and others.mean().abs() < 0.05
    assert not embedding[3].any()
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    model.save_pretrained(tmp_path)
    loaded = StepsTransformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    with pytest.raises(ValueError, match=r"embedding_initializer_range: got 0.0, expected a number above 0"):
        StepsTransformerConfig(**ARGS, embedding_initializer_range=0.0)


class Called(nn.Module):
    """A decoder layer with what it needs besides its input."""

    def __init__(self, layer, **kwargs):
        super().__init__()
        self.layer, self.kwargs = layer, kwargs

    def forward(self, y):
        return self.layer(y, **self.kwargs)


@PROFILES
def test_the_residual_stream_is_that_of_a_stepsnet(ids, profile):
    """The same layers in a StepsNet, with a causal mask written out: logits, hidden states and gradients."""
    model = make(**profile)
    config, decoder = model.config, model.model
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    networks, index = [], 0
    for step, depth in zip(config.steps, config.depths):
        positions = LlamaRotaryEmbedding(step)(torch.zeros(1), torch.arange(9)[None])
        layers = decoder.layers[index : index + depth]
        networks.append(nn.Sequential(*(Called(m, attention_mask=mask, position_embeddings=positions) for m in layers)))
        index += depth
    container = StepsNet(networks, config.widths)
    stream = decoder.embed_tokens(ids)
    expected = model.lm_head(decoder.norm(container(stream)))
    torch.testing.assert_close(model(ids).logits, expected)
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    ours = torch.autograd.grad(model(ids).logits.square().sum(), list(model.parameters()))
    for mine, theirs in zip(ours, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    # hidden states are the whole residual stream after each layer
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 1 + len(container) and torch.equal(states[0], stream)
    for state, block in zip(states[1:-1], container):
        stream = block(stream)
        torch.testing.assert_close(state, stream)


def test_auto_classes_and_round_trip(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is StepsTransformerForCausalLM and type(AutoConfig.from_pretrained(tmp_path)) is type(
        model.config
    )
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert stepsnet.StepsTransformerConfig is StepsTransformerConfig
    torch.testing.assert_close(copy.deepcopy(model)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "sampling", "beam", "static"],
)
def test_generation_with_the_cache_equals_that_without(model, ids, how):
    check_generation(model, ids, how)


@pytest.mark.parametrize("profile", [BOW_TIE, REVERSE], ids=["bow-tie", "reverse"])
def test_other_profiles_generate_save_and_load(ids, profile, tmp_path):
    model = make(**profile)
    check_generation(model, ids, {"do_sample": False})
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.widths == list(profile["widths"]) and again.config.hidden_size == 64
    assert torch.equal(again(ids).logits, model(ids).logits)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert profile is BOW_TIE or parameters == sum(parameter.numel() for parameter in make().parameters())


def check_generation(model, ids, how):
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        cache = how if use_cache else {k: v for k, v in how.items() if k != "cache_implementation"}
        outputs.append(model.generate(ids, max_new_tokens=12, use_cache=use_cache, **cache))
    assert torch.equal(*outputs) and outputs[0].shape[1] > ids.shape[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, ids, side):
    short, pad = ids[:1, :5], torch.zeros(1, 4, dtype=torch.long)
    parts = (pad, short) if side == "left" else (short, pad)
    padded, mask = torch.cat(parts, 1), torch.cat([(part != 0).long() for part in parts], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[mask.bool()], model(short).logits[0], atol=1e-5, rtol=1e-4)
    if side == "left":
        alone = model.generate(short, max_new_tokens=6, do_sample=False)
        both = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)
        assert torch.equal(both[:, 4:], alone)


def test_packed_texts_are_looked_for_only_where_positions_are_given(model, monkeypatch):
    """To look for them makes a GPU wait in every forward pass; texts packed with positions stay apart."""
    ids = torch.randint(3, 101, (1, 10), generator=torch.Generator().manual_seed(0))
    first, second = ids[:, :6], ids[:, 6:]
    positions = torch.cat((torch.arange(6), torch.arange(4)))[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(text, use_cache=False).logits for text in (first, second)], 1)
    torch.testing.assert_close(packed, alone)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    model(ids, use_cache=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_attention_implementations_agree(ids, implementation):
    model = make()
    expected = model(ids).logits
    model.set_attn_implementation(implementation)
    assert model.model.layers[0].self_attn.config._attn_implementation == implementation
    with torch.no_grad():  # flex attention has no backward pass on a CPU
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-3)


def test_attentions_are_those_of_each_layer(ids):
    model = make(attn_implementation="eager")
    attentions = model(ids, output_attentions=True).attentions
    assert [tuple(a.shape) for a in attentions] == [(2, heads, 9, 9) for heads in (2, 2, 3, 4)]


def test_gradient_checkpointing_gives_the_same_gradients(ids):
    gradients = []
    for checkpointed in (False, True):
        model = make().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


def test_export_and_compile(model, ids):
    program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, model(ids).logits)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


def test_lora(ids):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model(ids, labels=ids).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 2 * 2 * 4 and all("lora_" in name for name in trained)
    merged = model.merge_and_unload()
    assert type(merged) is StepsTransformerForCausalLM


@pytest.mark.parametrize("adapter", [{"trainable_token_indices": [5]}, {"target_modules": ["embed_tokens"]}])
def test_adapters_of_a_scaled_embedding_know_its_scale(ids, adapter):
    """An untrained one changes nothing, and merging a trained one neither."""
    from peft import LoraConfig, get_peft_model

    model = make(embedding_scale=50.0, tie_word_embeddings=False)
    expected = model(ids).logits
    trained = "target_modules" in adapter
    config = LoraConfig(
        r=4, task_type="CAUSAL_LM", init_lora_weights=not trained, **{"target_modules": ["q_proj"], **adapter}
    )
    adapted = get_peft_model(model, config).eval()
    got = adapted(ids).logits
    if trained:
        assert (got - expected).abs().max() > 1e-2
        expected = adapted.merge_and_unload()(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 512}, {"hidden_size": 4096}, {"num_hidden_layers": 9}, {"head_dim": 64}]
)
def test_sizes_that_follow_from_the_steps_are_not_taken_in_silence(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: got {next(iter(changes.values()))}, expected widths"):
        StepsTransformerConfig(**{**ARGS, **changes})


def test_other_depths_of_a_configuration_that_is_there_are_so_many_layers(ids, tmp_path):
    StepsTransformerConfig(**ARGS).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, depths=[3, 2, 2])
    assert config.num_hidden_layers == 7 and config.auto_map == {}  # which trl reads
    model = AutoModelForCausalLM.from_config(config)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path / "deeper")
    assert "auto_map" not in (tmp_path / "deeper" / "config.json").read_text()
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "deeper").model.layers) == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"widths": [32, 48, 96]}, "hidden_size: got 64, expected 96, from widths"),
        ({"widths": [32, 64]}, "depths: got .2, 1, 1., expected one per width"),
        ({"num_attention_heads": [1, 1, 1]}, "head_dim: got 16, expected 64, from widths"),
        ({"intermediate_size": 64}, "intermediate_size: got 64, expected one per width"),
        ({"num_hidden_layers": 9}, "num_hidden_layers: got 9, expected 1 to 4, the sum of depths"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected 1 to 4, the sum of depths"),
    ],
)
def test_other_sizes_of_a_configuration_that_is_there_are_one_line(changes, said, tmp_path):
    StepsTransformerConfig(widths=[32, 48, 64], depths=[2, 1, 1], num_attention_heads=[2, 3, 4]).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, vocab_size=101, **changes))


def test_fewer_layers_end_the_stream_as_in_llama(ids, tmp_path):
    model = make(depths=(2, 2, 1))
    seen = []
    handle = model.model.layers[2].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    states = model(ids, output_hidden_states=True).hidden_states
    handle.remove()
    model.save_pretrained(tmp_path)
    short = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=3).eval()
    expected = model.lm_head(model.model.norm(states[3]))  # behind three layers, with the channels that wait
    torch.testing.assert_close(short(ids).logits, expected)
    one, whole = (count_language_model(each, 8) for each in (short, model))
    last = model.model.layers[3:]  # of 2, 2 and 1
    unused = sum(part.weight.numel() for part in last.modules() if isinstance(part, nn.Linear))
    unused += 2 * 8 * (model.config.widths[1] + model.config.widths[2])  # attention
    assert (one.blocks, whole.blocks) == (3, 5) and one.macs == whole.macs - unused
    short.save_pretrained(tmp_path / "short")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "short").eval()
    torch.testing.assert_close(again(ids).logits, expected)
    drafted = model.generate(ids[:1], max_new_tokens=5, do_sample=False, assistant_early_exit=3)
    assert torch.equal(drafted, model.generate(ids[:1], max_new_tokens=5, do_sample=False)) and seen


def test_a_step_that_is_not_reached_weighs_nothing(ids, tmp_path):
    torch.manual_seed(0)
    model = make(depths=(2, 1, 1), residual="deep_cross_attention")
    for stream in model.model.streams:
        for parameter in stream.parameters():
            nn.init.normal_(parameter)
    states = model(ids, output_hidden_states=True).hidden_states
    model.save_pretrained(tmp_path)
    short = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2).eval()
    torch.testing.assert_close(short(ids).logits, model.lm_head(model.model.norm(states[2])))


@pytest.mark.parametrize(("depths", "layers"), [((31, 4, 2), None), ((6, 6, 4), 12), ((31, 4, 2), 32)])
def test_as_many_layers_as_told_run(ids, depths, layers, tmp_path):
    """Not so many as a LLaMA of the default size has, 32, or as the default configuration, 12."""
    sizes = {**ARGS, "widths": [16, 24, 32], "depths": depths, "num_attention_heads": [1, 1, 1]}
    model = AutoModelForCausalLM.from_config(StepsTransformerConfig(**sizes, num_hidden_layers=layers)).eval()
    ran = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    expected = model(ids).logits
    assert len(ran) == model.config.num_hidden_layers == (layers or sum(depths))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.num_hidden_layers == len(ran)
    torch.testing.assert_close(again(ids).logits, expected)


def test_texts_and_tokens_are_classified(ids, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    hidden = model.model(ids).last_hidden_state
    texts = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    torch.testing.assert_close(texts(ids).logits, texts.score(hidden)[:, -1])
    assert texts(ids, labels=torch.tensor([0, 2])).loss.isfinite()
    tokens = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=3).eval()
    torch.testing.assert_close(tokens(ids).logits, tokens.score(hidden))
    answers = AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    found = answers(ids)
    torch.testing.assert_close(torch.stack([found.start_logits, found.end_logits], -1), answers.qa_outputs(hidden))


def test_trainer_takes_two_steps(ids, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = make()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_steps=2
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    result = Trainer(model, arguments, train_dataset=rows).train()
    assert result.global_step == 2 and not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").config.widths == [32, 48, 64]


def test_the_cache_is_narrower_than_the_baselines(model, ids):
    cache = model(ids, use_cache=True).past_key_values
    assert [tuple(layer.keys.shape[1::2]) for layer in cache.layers] == [(2, 16), (2, 16), (3, 16), (4, 16)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_attention_heads": (2, 5, 4)}, "num_attention_heads: got 5, expected a divisor of the width 48"),
        ({"num_attention_heads": (2, 16, 4)}, "heads of size 3, expected an even size"),
        ({"widths": (32, 45, 64)}, "heads of size 15, expected an even width, as stepsnet plan --round-to 2 gives"),
        ({"widths": (32, 0, 48)}, r"widths: got \(32, 0, 48\), expected positive integers"),
        ({"depths": (2, 1)}, r"depths: got \(2, 1\), expected one per width"),
        ({"num_key_value_heads": (2, 2, 4)}, "num_key_value_heads: got 2, expected a divisor of the 3 heads"),
        ({"intermediate_size": (64,)}, "intermediate_size: got .64., expected one per width"),
        ({"num_hidden_layers": 9}, "num_hidden_layers: got 9, expected widths, depths and num_attention_heads, from"),
        ({"head_dim": 64}, "head_dim: got 64, expected widths"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: got longrope, whose factors"),
        ({"num_attention_heads": 4}, r"num_attention_heads: got \(4,\), expected one per width"),
        ({"num_key_value_heads": (0, 1, 1)}, r"num_key_value_heads: got \[0, 1, 1\], expected integers of at least 1"),
        ({"intermediate_size": (8.5, 8, 8)}, r"intermediate_size: got \[8.5, 8, 8\], expected integers of at least 1"),
        ({"norm_slices": [-1, 65]}, r"norm_slices: got \[-1, 65\], expected integers of at least 1"),
        ({"widths": None}, "widths: got None, expected an integer, or a list with one per step"),
        ({"embedding_scale": 0}, "embedding_scale: got 0, expected a number above 0"),
        ({"embedding_scale": float("nan")}, "embedding_scale: got nan, expected a number above 0"),
        ({"embed_dim": 64}, "unknown argument 'embed_dim'"),
        ({"widht": 64}, "unknown argument 'widht', expected an argument of StepsTransformerConfig .did you mean wid"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_line(changes, expected):
    with pytest.raises(UserError, match=rf"^model steps_transformer: .*{expected}") as error:
        build_model(ModelSpec("steps_transformer", {**ARGS, **changes}))
    assert "\n" not in str(error.value)


def test_default_heads_are_of_even_size():
    """Where those nearest to a size of 64 are of an odd one, which rotary positions do not rotate."""
    assert StepsTransformerConfig(widths=[64, 90, 128], depths=[6, 3, 3]).num_attention_heads == [1, 1, 2]
    for width in range(2, 1500, 2):
        (heads,) = StepsTransformerConfig(widths=width, depths=1).num_attention_heads
        nearest = heads_for(width, 64)
        assert width // heads % 2 == 0 and (heads == nearest or width // nearest % 2)


def test_table_4():
    rows = compare_table("4")
    assert len(rows) == 6 and not any(row["differs"] for row in rows)
    for row in rows:  # the parameters, written out
        widths, depths = (row["model"]["arguments"][key] for key in ("widths", "depths"))
        params = 50_000 * widths[-1] + widths[-1]
        params += sum(depth * (4 * c * c + 3 * c * round(8 * c / 3) + 2 * c) for c, depth in zip(widths, depths))
        assert row["exact"]["params"] == params


def test_the_tokenizer_of_a_run_is_transformers(tmp_path):
    from stepsnet.tasks.language.data import load_text

    data = load_text("python-docs", "characters", None)
    fast = PreTrainedTokenizerFast(tokenizer_object=data.tokenizer)
    assert fast.decode(fast("def f():\n  pass")["input_ids"]) == "def f():\n  pass"


@pytest.mark.parametrize("residual", ["plain", "mhc"])
def test_layers_are_not_split_over_devices(residual):
    model = stepsnet.models.steps_transformer.create(**ARGS, residual=residual)
    kinds = {type(layer).__name__ for layer in model.model.layers}
    assert kinds == {"ConnectedLlamaDecoderLayer" if residual == "mhc" else "LlamaDecoderLayer"}
    assert set(model._no_split_modules) == kinds


def test_layers_on_several_devices():
    """accelerate's hooks move what a layer is called with, and not the channels that wait. Meta stands for a GPU."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = StepsTransformerForCausalLM(StepsTransformerConfig(**ARGS, tie_word_embeddings=False)).eval()
    for module in (*model.model.layers[1:], model.model.norm, model.lm_head):
        hooks.add_hook_to_module(module.to("meta"), hooks.AlignDevicesHook(execution_device="meta"))
    output = model(torch.arange(5)[None], output_hidden_states=True)
    assert output.logits.shape == (1, 5, 101)
    assert [z.device.type for z in output.hidden_states] == ["cpu"] * 2 + ["meta"] * 3


def test_a_model_of_one_layer_is_counted():
    model = StepsTransformerForCausalLM(StepsTransformerConfig(widths=64, depths=1, vocab_size=101))
    counted = count_language_model(model, 16)
    linear = 4 * 64 * 64 + 3 * 64 * 171
    assert (counted.blocks, counted.layers, counted.macs) == (1, 6, linear + 64 * 101 + 2 * 16 * 64)


@pytest.mark.parametrize("make", ["ours", "mistral"])
def test_a_cache_has_the_layers_that_run(make):
    """As where the first layers draft what the model then checks (assistant_early_exit)."""
    torch.manual_seed(0)
    if make == "ours":
        model = StepsTransformerForCausalLM(StepsTransformerConfig(**ARGS))
    else:
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
        config = MistralConfig(**sizes, num_key_value_heads=4, vocab_size=101, sliding_window=4)
        model = stepsnet.stepify(MistralForCausalLM(config), steps=2)
    ids = torch.arange(1, 9)[None]
    plain = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model.eval().generate(ids, **plain)
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **plain), expected)
    model.config.num_hidden_layers = 2
    assert len(DynamicCache(config=model.config).layers) == 2
