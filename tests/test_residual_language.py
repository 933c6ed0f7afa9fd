"""The designs of the residual stream in the language model: caches, saved folders, recomputation, measurements."""

import copy
import math

import pytest
import torch
from residual_networks import JOINED, OPTIONS, stirred
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stepsnet.residual
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks
from stepsnet.models.build import build_model
from stepsnet.settings.config import ModelSpec

TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(5))
NAMES = pytest.mark.parametrize("name", ["plain", *JOINED])


def build(name, seed=0, **arguments):
    torch.manual_seed(seed)
    shape = dict(vocab_size=40, widths=(16, 24), depths=(3, 2), num_attention_heads=(2, 2), max_position_embeddings=32)
    options = {"residual_options": OPTIONS[name]} if name in OPTIONS else {}
    return build_model(ModelSpec("steps_transformer", {**shape, "residual": name, **options, **arguments}))


def loss_of(model):
    return F.cross_entropy(model(TOKENS, use_cache=False).logits.flatten(0, 1), TOKENS.flatten())


def test_weights_that_were_loaded_stay_where_a_design_has_more_of_them(tmp_path):
    static = stirred(build("hyper_connections", residual_options={"streams": 2, "dynamic": False}), 0.2)
    static.save_pretrained(tmp_path)
    options = {"streams": 2, "dynamic": True}
    dynamic = type(static).from_pretrained(tmp_path, residual_options=options).state_dict()
    for key, value in static.state_dict().items():
        assert torch.equal(dynamic[key], value), key
    assert all(not value.any() for key, value in dynamic.items() if key.endswith("connections.0.W"))


@pytest.mark.parametrize("name", [*JOINED, "zero_linear"])
def test_a_plain_model_that_is_loaded_into_a_design_starts_as_the_design_does(name, tmp_path, monkeypatch):
    """What the library has not loaded is memory that nobody has written to."""
    monkeypatch.setitem(stepsnet.residual.DESIGNS, "zero_linear", ZeroLinear)
    plain = stirred(build("plain"), 0.2)
    plain.save_pretrained(tmp_path)
    new = [build(name, seed=seed).state_dict() for seed in (0, 1)]
    unwritten = lambda tensor, **given: torch.full(tensor.shape, 777.0, dtype=tensor.dtype)  # noqa: E731
    monkeypatch.setattr("transformers.modeling_utils.torch.empty_like", unwritten)
    options = {"residual_options": OPTIONS[name]} if name in OPTIONS else {}
    loaded = type(plain).from_pretrained(tmp_path, residual=name, **options).state_dict()
    monkeypatch.undo()
    for key, value in loaded.items():
        if key in plain.state_dict():
            assert torch.equal(value, plain.state_dict()[key]), key
        elif torch.equal(new[0][key], new[1][key]):
            assert torch.equal(value, new[0][key]), key
        else:
            assert value.std().item() == pytest.approx(new[0][key].std().item(), rel=0.5), key
    if name == "zero_linear":
        assert not any(value.any() for key, value in new[0].items() if ".linear." in key)


class ZeroLinear(stepsnet.residual.Connection):
    """A user's, with weights in a layer of torch's, which it writes to in place."""

    title, source = "a linear layer behind each branch, which starts at 0", "none"

    def __init__(self, place, options):
        super().__init__(place, options)
        self.linear = torch.nn.Linear(place.width, place.width)
        self.init_weights()

    def init_weights(self):
        for parameter in self.linear.parameters():
            parameter.data.zero_()

    def forward(self, x, F):
        return x + F(x) + self.linear(x)


def test_trained_weights_of_a_users_design_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(stepsnet.residual.DESIGNS, "zero_linear", ZeroLinear)
    model = stirred(build("zero_linear"), 0.2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


@NAMES
def test_a_cache_changes_nothing_and_a_saved_model_is_the_same(name, tmp_path):
    model = stirred(build(name), 0.2).eval()
    assert blocks_of(model) == list(model.model.layers)
    whole = model(TOKENS, use_cache=False, output_hidden_states=True)
    assert [tuple(state.shape) for state in whole.hidden_states] == [(2, 9, 24)] * 6
    cache, logits = None, []
    for position in range(9):
        output = model(TOKENS[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=1e-4, atol=1e-4)
    cached = model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(
        cached, model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=False)
    )
    half = copy.deepcopy(model).bfloat16()(TOKENS, use_cache=False).logits
    assert half.dtype == torch.bfloat16
    assert F.cosine_similarity(half.float().flatten(), whole.logits.flatten(), 0) > 0.98
    kinds = []
    blocks_of(model)[-1].register_forward_hook(lambda block, arguments, output: kinds.append(output))
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, use_cache=False)
    assert (kinds[0][-1] if isinstance(kinds[0], tuple) else kinds[0]).dtype == torch.float32  # the stream's own
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.residual == name
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    # not bit for bit: some processors round by where in memory the weights are
    torch.testing.assert_close(again(TOKENS, use_cache=False).logits, whole.logits)


@NAMES
def test_it_learns_is_recomputed_and_measured(name):
    model = build(name, embedding_scale=50.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reached, losses = set(), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        reached |= {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert {key for key, _ in model.named_parameters()} == reached
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    recompute_blocks(blocks_of(ours))
    theirs.train().gradient_checkpointing_enable({"use_reentrant": False})
    for network in (ours, theirs):
        torch.testing.assert_close(torch.autograd.grad(loss_of(network), list(network.parameters())), expected)
    measured = measure_stream(model, loss_of)
    assert [block.width for block in measured] == [16, 16, 16, 24, 24]
    assert all(math.isfinite(v) and v > 0 for block in measured for v in (block.gamma, block.branch, block.gradient))


@pytest.mark.parametrize("name", ["fixup", "deepnorm", "rezero"])
def test_the_start_of_a_design_is_drawn_once_and_trained_weights_stay(name, tmp_path):
    """transformers leaves modules without parameters of their own out, and marks what it has loaded."""
    model = build(name, widths=(128,), depths=(4,), num_attention_heads=(2,), intermediate_size=(256,))
    layer = model.model.layers[1]
    q, v, o = (getattr(layer.self_attn, f"{one}_proj").weight for one in "qvo")
    up, down = layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
    sixth, beta = 8 ** (-1 / 6), 32**-0.25
    scales = {"fixup": (sixth, sixth, 0, 8**-0.5, 0), "deepnorm": (1, *[beta] * 4), "rezero": (1, 1, 1, 1, 1)}[name]
    for weight, expected in zip((q, v, o, up, down), scales):
        assert weight.std().item() == pytest.approx(expected * math.sqrt(2 / sum(weight.shape)), rel=0.05)
    stirred(model, 0.2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["fixup", "deepnorm", "rezero"])
def test_a_loaded_model_that_gets_a_design_begins_as_the_design_says(name, tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2, vocab_size=31)
    stirred(LlamaForCausalLM(LlamaConfig(**sizes)), 0.2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    blocks = stepsnet.residual.connect(model.model.layers, name).blocks
    last = {"fixup": 0, "deepnorm": 32**-0.25, "rezero": 1}[name] * math.sqrt(2 / (128 + 256))
    assert blocks[1].mlp.down_proj.weight.std().item() == pytest.approx(last, rel=0.05)


def test_the_plain_model_has_the_keys_and_the_start_that_it_had():
    plain, ours = build("plain"), build("mhc")
    assert not any("streams" in key or "connections" in key for key in plain.state_dict())
    assert plain.state_dict().keys() < ours.state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residual": "value_resid"}, "residual: got 'value_resid', expected .*did you mean value_residual"),
        ({"residual": "mhc", "residual_options": {"stream": 4}}, "mhc got the option 'stream', expected streams"),
        ({"residual": "mhc", "residual_options": 4}, "residual_options"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        build("plain", **arguments)
    assert "\n" not in str(error.value)
